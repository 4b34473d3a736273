"""What the commands read from a YAML file, and how to tell from the file which of them is meant. Free of torch."""

from pydantic import BaseModel, ConfigDict

from modalities.config.tree import Node
from modalities.data.recipes import InstructionTuningRecipe, PackingRecipe
from modalities.inference.recipes import TextGenerationRecipe
from modalities.training.recipe import ProfilingRecipe, TrainingRecipe


class ComponentsRecipe(BaseModel):
    """Components that no command of modalities reads: a template, or what a program of the user's own builds."""

    model_config = ConfigDict(defer_build=True, extra="allow")


RECIPES: dict[str, type[BaseModel]] = {
    "training": TrainingRecipe,
    "packing": PackingRecipe,
    "instruction-tuning": InstructionTuningRecipe,
    "text-generation": TextGenerationRecipe,
    "profiling": ProfilingRecipe,
    "components": ComponentsRecipe,
}


def recipe_of(root: Node) -> type[BaseModel]:
    """The recipe that a file is for, by the entries that only this recipe has.

    Args:
        root: The file's tree, as written.
    """
    entries = set(root.value)
    if "text_inference_component" in entries:
        return TextGenerationRecipe
    if entries & {"instruction_data_transformation", "jinja2_chat_template"}:
        return InstructionTuningRecipe
    if "steppable_component" in entries:
        return ProfilingRecipe
    settings = root.value.get("settings")
    if settings is not None and isinstance(settings.value, dict) and "src_path" in settings.value:
        return PackingRecipe
    if not entries & {"defaults", *TrainingRecipe.model_fields} - {"model_raw"}:
        return ComponentsRecipe
    return TrainingRecipe


def name_of(recipe: type[BaseModel]) -> str:
    """How a recipe is called."""
    return next((name for name, known in RECIPES.items() if known is recipe), recipe.__name__)
