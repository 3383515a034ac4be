"""The command-line flags of the settings, generated from the table, and a parser that names mistakes.

Values stay text here and are converted in `load`, so that a bad flag is reported together with everything
else that is wrong. Does not know which commands exist.
"""

import argparse
import difflib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from myxtts.settings.loading import DEFAULT_CONFIG_FILE
from myxtts.settings.nearest import CONFIG_FLAG, suggestion
from myxtts.settings.table import Spec, descriptions, section_descriptions, specs
from myxtts.settings.values import ContradictingFlags, plain


class Parser(argparse.ArgumentParser):
    """A parser that says what a misspelt command, choice or flag may have been."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self._given = args or ()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """A flag that is missing may be there and misspelt, so those that nobody knows are named as well."""
        known = self._option_string_actions
        given = self._given if self._subparsers is None else ()  # else most of them are for a subparser to know
        flags = dict.fromkeys(word.partition("=")[0] for word in given if word.startswith("--"))
        near = {flag: difflib.get_close_matches(flag, known, n=1) for flag in flags if flag not in known}
        hints = [f"\nunknown flag {flag}; did you mean {found[0]}?" for flag, found in near.items() if found]
        super().error(message + "".join(hints))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if advice := suggestion(str(value), [str(choice) for choice in action.choices or ()]):
                error.message += f"; {advice}"
            raise


class _Record(argparse.Action):
    """Notes the flag as it was spelled, with its text or, for a switch, whether it says on or off."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, spec: Spec, help: str) -> None:
        self.spec = spec
        switch = spec.kind is bool
        super().__init__(
            option_strings,
            dest,
            nargs=0 if switch else None,
            default=argparse.SUPPRESS,
            metavar=None if switch else metavar(spec),
            help=help,
        )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        del parser
        value = flag not in self.spec.off_flags if self.spec.kind is bool else values
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), (flag, value)])


def metavar(spec: Spec) -> str:
    """What stands for the value in `--help`."""
    if spec.choices:
        return ",".join(spec.choices) if spec.kind is tuple else "{" + ",".join(spec.choices) + "}"
    return spec.metavar or {int: "N", float: "X"}.get(spec.kind, "TEXT")


def add_flags(parser: argparse.ArgumentParser, only: Collection[str] | None = None) -> None:
    """Adds `--config` and the flags of all settings, or of those whose canonical keys are in `only`."""
    parser.add_argument(
        CONFIG_FLAG,
        type=Path,
        metavar="F",
        help=f"YAML file of settings; flags win over it [default: {DEFAULT_CONFIG_FILE} if it exists]",
    )
    for section, about in section_descriptions().items():
        wanted = [s for s in specs().values() if s.section == section and (only is None or s.key in only)]
        if not wanted:
            continue
        group = parser.add_argument_group(f"{section} settings", about)
        for spec in wanted:
            words = descriptions()[spec.key].replace("`null`", "`none`")
            text = f"{words} [default: {plain(spec.default)}]"
            group.add_argument(
                *spec.flags,
                *spec.off_flags,
                dest=spec.key,
                action=_Record,
                spec=spec,
                help=text.replace("%", "%%"),
            )


def flags_of(namespace: argparse.Namespace) -> dict[str, object]:
    """The settings given on this command line, by canonical key.

    Of a flag that is repeated the last one counts, as users of a shell expect; different flags of one setting
    that disagree (`--enable-static-shapes --disable-static-shapes`) become an error in `load`.
    """
    given: dict[str, object] = {}
    for key in specs():
        uses: list[tuple[str, object]] = getattr(namespace, key, [])
        last = dict(uses)
        if len(set(last.values())) > 1:
            given[key] = ContradictingFlags(tuple(last))
        elif uses:
            given[key] = uses[-1][1]
    return given
