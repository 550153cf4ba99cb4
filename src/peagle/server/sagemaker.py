"""SageMaker's container contract: flags from the environment, the model from its usual places."""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

PREFIX = "SM_VLLM_"
MODEL_DIRECTORY = Path("/opt/ml/model")


def flags_from_environment(environment: Mapping[str, str], switches: Container[str]) -> list[str]:
    """`SM_VLLM_MAX_MODEL_LEN=2048` -> `--max-model-len=2048`; true is a bare flag, false no flag.

    switches: the flags that have a `--no-` form, which false gives.
    """
    flags: list[str] = []
    for name, value in sorted(environment.items()):
        if not name.startswith(PREFIX) or name == f"{PREFIX}MODEL":
            continue
        flag = "--" + name.removeprefix(PREFIX).lower().replace("_", "-")
        if value.lower() == "true":
            flags.append(flag)
        elif value.lower() != "false":
            flags.append(f"{flag}={value}")
        elif flag in switches:
            flags.append(flag.replace("--", "--no-", 1))
    return flags


def with_environment(
    arguments: Sequence[str], environment: Mapping[str, str], switches: Container[str]
) -> list[str]:
    """A container's command line: its variables as flags before the arguments."""
    if not any(name.startswith(PREFIX) for name in environment):
        return list(arguments)
    flags = flags_from_environment(environment, switches)
    model = model_from_environment(environment)
    return [*flags, *([model] if model and not _names_target(arguments) else []), *arguments]


def _names_target(arguments: Sequence[str]) -> bool:
    first = arguments[0] if arguments else "-"
    names = {argument.partition("=")[0] for argument in arguments}
    return not first.startswith("-") or not names.isdisjoint(("--target", "--model"))


def model_from_environment(
    environment: Mapping[str, str], directory: Path = MODEL_DIRECTORY
) -> str | None:
    """`SM_VLLM_MODEL`, else the model in SageMaker's directory, else `HF_MODEL_ID`."""
    if environment.get(f"{PREFIX}MODEL"):
        return environment[f"{PREFIX}MODEL"]
    if (directory / "config.json").exists():
        return str(directory)
    return environment.get("HF_MODEL_ID") or None
