"""Export of a run's checkpoint as a Hugging Face folder, without a GPU."""

from pathlib import Path
from typing import Any

from memsaver.errors import format_bytes
from recipes.config.load import load
from recipes.config.recipe import Recipe
from recipes.errors import RecipeError, RunError, check_empty, one_line
from recipes.logs.checkpoints import Checkpoints
from recipes.logs.run_folder import check_holds_run
from recipes.setup.model_files import find_model


def export_run(
    run_dir: Path,
    to: Path,
    *,
    merge_adapters: bool = False,
    step: int | None = None,
    best: bool = False,
) -> str:
    """Export a checkpoint of a run, which may still be running.

    Args:
        run_dir: Folder of the run.
        to: Folder to write, new or empty.
        merge_adapters: Export the whole model with the adapters merged, not the adapters alone.
        step: Step of the checkpoint; None for the newest.
        best: Take the checkpoint of the best evaluation, whatever `step` is.

    Returns:
        A line for the user: where the export is, its size, and how to load it.

    Raises:
        RecipeError: There is no such checkpoint, the checkpoint cannot be exported like this, or
            `to` is not empty. Nothing was written.
        RunError: Reading or writing failed. Nothing is left of the export.
    """
    check_holds_run("export", run_dir)
    recipe = load(run_dir / "recipe.yaml")
    checkpoint = Checkpoints(run_dir).chosen(step, best)
    if merge_adapters and not recipe.lora.rank:
        raise RecipeError("--merge: the run trains no adapters; drop --merge")
    try:
        check_empty("--to", to)
        _export(recipe, run_dir, checkpoint, to, merge_adapters)
    except OSError as error:
        remedy = "repair that and export again; nothing was left behind"
        raise RunError("export", one_line(error), remedy) from error
    size = format_bytes(sum(file.stat().st_size for file in to.iterdir()))
    loader = "AutoModelForCausalLM"
    if (to / "adapter_config.json").is_file():
        loader = "AutoPeftModelForCausalLM"
    name = checkpoint.name.replace("_", " ")
    return f"{to}: {name}, {size}; load it with {loader}.from_pretrained({str(to)!r})"


def _export(recipe: Recipe, run_dir: Path, checkpoint: Path, to: Path, merge: bool) -> None:
    from trainer_bridge import TrainerConfig
    from trainer_bridge.models import export_checkpoint, read_values

    path = recipe.model.path
    config = TrainerConfig(
        model_path=str(run_dir / "model" if path is None else find_model(path)),
        random_init=recipe.model.random_init,
        dtype=recipe.trainer.dtype,
        param_dtype=recipe.model.dtype,
    )
    try:
        template = read_values(str(checkpoint))["extra"].get("template")
        how: dict[str, Any] = {"merge_adapters": merge, "chat_template": template}
        export_checkpoint(str(checkpoint), str(to), config, **how)
    except ValueError as error:
        raise RecipeError(f"export {run_dir}: {one_line(error)}; nothing was written") from error
