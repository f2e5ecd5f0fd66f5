"""The trainer's command line, read back by the programs it is for."""

from pathlib import Path

from rlkit.recipe import Recipe, load_recipe
from rlkit.run_folder import RunFolder
from rlkit.training.launch import trainer_command

RUNS = Path(__file__).parents[2] / "runs"


def command(recipe: Recipe, checkpoint: Path | None = None) -> list[str]:
    return trainer_command(recipe, RunFolder(Path("run")), "model", "http://127.0.0.1:1", checkpoint)


def test_one_process_is_plain_python() -> None:
    assert command(load_recipe(RUNS / "local.yaml"))[1:3] == ["-m", "rlkit.training.entry"]


def test_a_checkpoint_is_passed_on() -> None:
    line = command(load_recipe(RUNS / "local.yaml"), Path("run/shared/checkpoint-10"))
    assert line[-2:] == ["--resume-from", "run/shared/checkpoint-10"]


def test_checkpoints_can_lie_elsewhere_than_the_records() -> None:
    folder = RunFolder(Path("run"), shared_at=Path("/bucket/shared"))
    line = trainer_command(load_recipe(RUNS / "local.yaml"), folder, "model", "http://127.0.0.1:1")
    assert line[line.index("--folder") + 1] == "run"
    assert line[-2:] == ["--shared", "/bucket/shared"]
    assert folder.shared == Path("/bucket/shared")


def test_several_processes_are_fsdp2_as_accelerate_reads_it() -> None:
    from accelerate.commands.launch import launch_command_parser

    line = command(load_recipe(RUNS / "published" / "r1-dp2.yaml"))
    assert line[1:3] == ["-m", "accelerate.commands.launch"]
    read = launch_command_parser().parse_args(line[3:])
    assert (read.num_processes, read.use_fsdp, read.fsdp_version, read.mixed_precision) == (2, True, "2", "bf16")
    assert read.fsdp_state_dict_type == "SHARDED_STATE_DICT"
    assert read.fsdp_reshard_after_forward == "false"
    assert (read.module, read.training_script) == (True, "rlkit.training.entry")
    assert "--server-url" in read.training_script_args
