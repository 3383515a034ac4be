"""What each stage trains, and the loss of one micro-step."""

from myxtts.training.recipes.decoder import DecoderRecipe
from myxtts.training.recipes.dvae import DvaeRecipe
from myxtts.training.recipes.gpt import GptRecipe
from myxtts.training.recipes.recipe import Recipe

__all__ = ["DecoderRecipe", "DvaeRecipe", "GptRecipe", "Recipe"]
