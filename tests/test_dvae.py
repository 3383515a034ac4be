"""The discrete VAE: equal to XTTS-v2's number for number, and a codebook that learns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model_fixtures import error, reference_of

from myxtts.model.dvae import DVAE, Codebook

reference = reference_of("dvae")
SIZES = ("num_tokens", "codebook_dim", "hidden_dim", "num_resnet_blocks")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def dvae(reference: dict[str, Any]) -> DVAE:
    model = DVAE(**{name: reference[name] for name in SIZES})
    model.load_state_dict(reference["state_dict"])
    return model.eval()


@pytest.fixture
def fitted(dvae: DVAE) -> tuple[DVAE, torch.Tensor]:
    """A codebook among its data (the fixture's codes are all the same one), and a mel that uses most of it."""
    mel = sounds(4, 640)
    dvae.codebook.cluster_size.zero_()
    with torch.no_grad():
        dvae.codebook.revive(dvae(mel).latents, torch.Generator().manual_seed(1))
        for _ in range(20):
            out = dvae(mel)
            dvae.codebook.update(out.latents, out.codes)
    return dvae, mel


def sounds(batch: int, frames: int, held: int = 16) -> torch.Tensor:
    """Like speech seen from far: a few dozen spectra, each held for a while, never twice the same."""
    random = torch.Generator().manual_seed(0)
    kinds = 2 * torch.randn(32, 80, generator=random)
    which = torch.randint(32, (batch, frames // held), generator=random)
    return kinds[which].repeat_interleave(held, 1).mT + 0.1 * torch.randn(batch, 80, frames, generator=random)


def slowly_nearest(latents: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    return torch.cdist(
        latents.double(), codebook.embed.double().mT, compute_mode="donot_use_mm_for_euclid_dist"
    ).argmin(-1)


def test_equals_the_reference(dvae: DVAE, reference: dict[str, Any]) -> None:
    assert torch.equal(dvae.encode(reference["mel"]), reference["codes"])
    assert error(dvae.decode(reference["codes"]), reference["decoded"]) <= 1e-4
    out = dvae(reference["mel"])
    assert error(out.reconstruction, reference["forward_out_eval"]) <= 1e-4
    assert error(out.mse, reference["recon_loss_elementwise"]) <= 1e-4
    assert error(out.commitment.mean(), reference["commit_loss"]) <= 1e-4


class TestCodes:
    @pytest.mark.parametrize("frames", [1, 2, 4, 5, 7, 8, 9, 118])
    def test_one_for_every_four_frames_begun(self, dvae: DVAE, frames: int) -> None:
        codes = dvae.encode(torch.zeros(3, 80, frames))
        assert codes.shape == (3, -(-frames // 4))
        assert codes.dtype == torch.int64
        assert dvae.decode(codes).shape == (3, 80, 4 * codes.shape[1])

    def test_are_of_the_first_nearest_vectors_in_float32(self, fitted: tuple[DVAE, torch.Tensor]) -> None:
        model, mel = fitted
        out = model(mel)
        expected = slowly_nearest(out.latents, model.codebook)
        assert len(out.codes.unique()) > 30
        assert torch.equal(out.codes, expected) and torch.equal(model.encode(mel), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(model.codebook.nearest(out.latents), expected)
            out = model(mel)
        assert out.latents.dtype == out.mse.dtype == out.commitment.dtype == torch.float32
        model.codebook.embed = torch.cat([model.codebook.embed] * 2, dim=1)
        assert torch.equal(model.encode(mel), expected)


class TestTraining:
    def test_gradients_pass_straight_through_and_commitment_reaches_only_the_encoder(
        self, fitted: tuple[DVAE, torch.Tensor]
    ) -> None:
        model, mel = fitted
        out = model.train()(mel)
        out.commitment.mean().backward(retain_graph=True)
        assert model.encoder[0][0].weight.grad.abs().sum() > 0
        assert all(parameter.grad is None for parameter in model.decoder.parameters())
        model.zero_grad()
        out.mse.mean().backward()
        vectors = model.codebook.vectors(out.codes).requires_grad_()
        (model._mel(vectors) - mel).square().mean().backward()
        # The bias ends the encoder, so its gradient is that of the latents, summed over all of them.
        torch.testing.assert_close(model.encoder[-1].bias.grad, vectors.grad.sum((0, 1)))
        assert all(parameter.grad.abs().sum() > 0 for parameter in model.encoder.parameters())

    def test_a_clip_is_treated_as_if_it_were_alone(self, fitted: tuple[DVAE, torch.Tensor]) -> None:
        model, mel = fitted
        lengths = torch.tensor([mel.shape[2], 96, 61, 4])
        garbage = mel.clone()
        for row, length in enumerate(lengths.tolist()):
            garbage[row, :, length:] = 100 * torch.randn(80, mel.shape[2] - length)
        codes, out = model.encode(garbage, lengths), model(garbage, lengths)
        for row, length in enumerate(lengths.tolist()):
            alone = model.encode(mel[row : row + 1, :, :length])[0]
            assert torch.equal(codes[row, : len(alone)], alone)
            assert out.mask[row].sum() == len(alone)
            if length % 4 == 0:
                assert error(out.reconstruction[row, :, :length], model.decode(alone[None])[0]) <= 1e-4
        distances = (model.codebook.vectors(out.codes) - out.latents).square().mean(-1)
        torch.testing.assert_close(out.commitment, distances * out.mask)

    def test_clips_behind_each_other_are_encoded_as_if_alone(self, fitted: tuple[DVAE, torch.Tensor]) -> None:
        model, mel = fitted
        lengths = [97, 4, 61]
        num_codes = [-(-length // 4) for length in lengths]
        row = torch.full((4 * (sum(num_codes) + 3), 80), 100.0)
        inside = [torch.zeros(len(row) // step, dtype=torch.bool) for step in (1, 2, 4)]
        start = 0
        for clip, length in enumerate(lengths):
            row[start : start + length] = mel[clip, :, :length].t()
            for step, mask in zip((1, 2, 4), inside, strict=True):
                mask[start // step : start // step + -(-length // step)] = True
            start += 4 * (num_codes[clip] + 1)
        codes, start = model.encode_packed(row, inside), 0
        for clip, length in enumerate(lengths):
            alone = model.encode(mel[clip : clip + 1, :, :length])[0]
            assert torch.equal(codes[start : start + num_codes[clip]], alone)
            start += num_codes[clip] + 1


class TestCodebook:
    def test_update_equals_a_slow_one(self) -> None:
        torch.manual_seed(0)
        book, latents, codes = Codebook(6, 10), torch.randn(3, 7, 6), torch.randint(8, (3, 7))
        book.cluster_size.uniform_(0, 5)
        sizes, sums = book.cluster_size.double().tolist(), book.embed_avg.double().mT.clone()
        for _ in range(3):
            book.update(latents, codes)
            for code in range(10):
                chosen = [latents[b, t].double() for b in range(3) for t in range(7) if int(codes[b, t]) == code]
                sizes[code] = 0.99 * sizes[code] + 0.01 * len(chosen)
                sums[code] = 0.99 * sums[code] + 0.01 * sum(chosen, torch.zeros(6).double())
        total = sum(sizes)
        for code in range(10):
            size = (sizes[code] + 1e-5) / (total + 10 * 1e-5) * total
            torch.testing.assert_close(book.embed[:, code], (sums[code] / size).float())
        torch.testing.assert_close(book.cluster_size, torch.tensor(sizes))

    def test_revival_draws_each_real_latent_once_and_by_the_generator(self) -> None:
        latents, mask = torch.arange(100.0).view(2, 50, 1), torch.zeros(2, 50)
        mask[:, 10:30] = 1
        books = [Codebook(1, 30) for _ in range(3)]
        for book, seed in zip(books, (1, 1, 2), strict=True):
            assert int(book.revive(latents, torch.Generator().manual_seed(seed), mask)) == 30
        drawn = books[0].embed.flatten()
        assert len(drawn.unique()) == 30
        assert torch.isin(drawn, latents[mask > 0]).all()
        assert torch.equal(books[0].embed, books[1].embed)
        assert not torch.equal(books[0].embed, books[2].embed)

    def test_usage_and_fewer_latents_than_codes_repeat(self) -> None:
        book = Codebook(1, 10)
        assert int(book.usage().used) == 0
        book.revive(torch.arange(4.0).view(4, 1), torch.Generator().manual_seed(0))
        assert len(book.embed.unique()) == 4
        book.cluster_size[:5], book.cluster_size[5:] = 3, 0
        usage = book.usage()
        assert (int(usage.used), round(float(usage.perplexity), 3)) == (5, 5.0)
        assert torch.equal(usage.counts, book.cluster_size)


class TestOnTheGpu:
    pytestmark = pytest.mark.gpu

    def test_float32_equals_the_cpu(self, fitted: tuple[DVAE, torch.Tensor]) -> None:
        model, mel = fitted
        expected = model(mel)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            on_gpu = copy.deepcopy(model).cuda()
            out, decoded = on_gpu(mel.cuda()), on_gpu.decode(expected.codes.cuda())
        assert (out.codes.cpu() == expected.codes).float().mean() >= 0.999
        assert error(out.latents, expected.latents) <= 1e-4
        assert error(decoded, expected.reconstruction) <= 1e-4

    def test_codes_in_bfloat16_agree(self, fitted: tuple[DVAE, torch.Tensor]) -> None:
        model, mel = fitted
        expected = model.encode(mel)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            codes = model.cuda().encode(mel.cuda())
        assert (codes.cpu() == expected).float().mean() >= 0.99
