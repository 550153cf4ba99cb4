"""`peagle serve`: an OpenAI-compatible endpoint."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from peagle.cli.groups import fields, flag_name, flattened
from peagle.cli.loading import choose_speculation, open_async_llm
from peagle.cli.options import (
    SIZES,
    DraftingFlags,
    Hardware,
    TargetArgument,
    TargetFlag,
    Threads,
    from_flags,
    one_of,
    use_threads,
)
from peagle.cli.unknown_flags import unknown_flag, with_effect
from peagle.config import ChatConfig, EngineConfig, SpeculativeConfig, parse_json_option
from peagle.errors import InputError, lacking, reason
from peagle.pair import bundled
from peagle.server import sagemaker

if TYPE_CHECKING:
    from peagle.async_llm import AsyncLLM
    from peagle.llm import LLM
    from peagle.server.settings import ServerSettings

EXAMPLE = """\b
Examples:
  peagle serve
  peagle serve ./target --drafter ./drafter --k 5
  peagle serve ./target --host 0.0.0.0 --api-key "$KEY" --max-num-seqs 16"""
BUNDLED_NAME = "peagle-demo"
Sizes = Annotated[dict[str, Any], fields(EngineConfig, SIZES)]
SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}
"""Lets vLLM's own flags through to it."""
KEY = "PEAGLE_API_KEY"
VLLM_KEEP_ALIVE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
"""vLLM's variable for what it has no flag for."""
KEEP = ("target", "target_flag", "drafter", "k", "speculative_config", "engine")
"""Parameters that are not passed to vLLM as flags of the same name."""


def with_environment(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command line of a SageMaker container: its variables as flags before the arguments."""
    if not any(name.startswith(sagemaker.PREFIX) for name in environment):
        return list(arguments)
    flags = sagemaker.flags_from_environment(environment, _switches())
    model = sagemaker.model_from_environment(environment)
    return [*flags, *([model] if model and not _names_target(arguments) else []), *arguments]


def _switches() -> set[str]:
    """Our flags that also have a `--no-` form."""
    parameters = inspect.signature(flattened(serve)).parameters.items()
    return {flag_name(name) for name, one in parameters if isinstance(one.default, bool)}


def _names_target(arguments: Sequence[str]) -> bool:
    first = arguments[0] if arguments else "-"
    return not first.startswith("-") or any(a.partition("=")[0] == "--target" for a in arguments)


def serve(
    context: typer.Context,
    *,
    target: TargetArgument = None,
    target_flag: TargetFlag = None,
    drafting: DraftingFlags,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Model name in the API; repeatable.", show_default="the target as given"),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help=f"Key that requests must carry; repeatable. Or set {KEY}."),
    ] = None,
    allowed_origins: Annotated[
        str | None,
        typer.Option(
            help="JSON list of web origins that may call the API.", show_default="its own"
        ),
    ] = None,
    sizes: Sizes,
    chat_template: Annotated[
        Path | None,
        typer.Option(help="Jinja file of the chat template.", show_default="the tokenizer's own"),
    ] = None,
    default_chat_template_kwargs: Annotated[
        str | None, typer.Option(help="JSON object of the chat template's variables.")
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(help="vLLM's name of how calls are written.", show_default="as found"),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(help="vLLM's name of how thoughts are written.", show_default="as found"),
    ] = None,
    max_queue: Annotated[
        int | None,
        typer.Option(
            help="Most requests that wait; further ones get 429.", show_default="no limit"
        ),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(help="Seconds to finish requests after SIGTERM.")
    ] = 30.0,
    timeout_keep_alive: Annotated[
        int,
        typer.Option(help="Seconds that an idle connection stays open.", envvar=VLLM_KEEP_ALIVE),
    ] = 180,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Form of log lines.")
    ] = "text",
    hardware: Hardware,
    threads: Threads = None,
    engine: Annotated[
        Literal["peagle", "vllm"],
        typer.Option(help="vllm starts vLLM with these flags and any of its own."),
    ] = "peagle",
) -> int | None:
    """Serve a target and its drafter behind OpenAI's API.

    By default the bundled pair. The page at / shows which tokens the drafter wrote.
    """
    place, further = _target(context, target, target_flag, engine)
    speculation = choose_speculation(place, drafting)
    secret = None if api_key else _key_of(os.environ)
    if engine == "vllm":
        _start_vllm(context, place, speculation, further, secret)
        return None
    further = with_effect(further)
    if further:
        raise _unknown(context, further[0])
    from peagle.server.settings import ServerSettings

    with from_flags(model_names="--served-model-name", api_keys="--api-key"):
        settings = ServerSettings(
            model_names=tuple(served_model_name or [place or BUNDLED_NAME]),
            api_keys=tuple(api_key or ()) if secret is None else (secret,),
            allowed_origins=parse_json_option(
                "--allowed-origins", allowed_origins or "[]", '["https://chat.example"]'
            ),
            max_queue=max_queue,
            drain_seconds=drain_seconds,
            timeout_keep_alive=timeout_keep_alive,
            log_format=log_format,
        )
        chat = ChatConfig(
            chat_template=_read_template(chat_template),
            default_chat_template_kwargs=parse_json_option(
                "--default-chat-template-kwargs",
                default_chat_template_kwargs or "{}",
                '{"enable_thinking": false}',
            ),
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
        )
        config = EngineConfig(**sizes, **hardware)
    use_threads(threads)
    return _serve(place, speculation, config, chat, settings, host, port)


def _target(
    context: typer.Context, argument: str | None, flag: str | None, engine: str
) -> tuple[str | None, list[str]]:
    """The target, and the words that are neither it nor flags of ours.

    Of those the first lands where the target is expected if that is given as a flag.
    """
    if argument is None or not argument.startswith("-"):
        return one_of(argument, flag, "target"), context.args
    if engine == "vllm" and flag is None:
        raise InputError(f"no such option: {argument}; vLLM's own come after the target")
    return flag, [argument, *context.args]


def _unknown(context: typer.Context, word: str) -> InputError:
    """For a word that is left over."""
    if word.startswith("-"):
        return InputError(unknown_flag(context, word))
    return InputError(f"unexpected argument: {word}")


def _key_of(environment: Mapping[str, str]) -> str | None:
    """The key in the environment variable, hidden from other users; the whole value is one key."""
    key = environment.get(KEY)
    if key is not None and not key.strip():
        raise InputError(f"{KEY} is empty; give a key, or unset it to let everyone in")
    return key and key.strip()


def _serve(
    target: str | None,
    speculation: SpeculativeConfig | None,
    config: EngineConfig,
    chat: ChatConfig,
    settings: "ServerSettings",
    host: str,
    port: int,
) -> int:
    """Take the port, then load, then serve: a taken port is reported before minutes of loading."""
    try:
        from peagle.server import run
    except ModuleNotFoundError as error:
        raise InputError(lacking(f"the server needs {error.name}", "serve")) from None
    run.end_on_sigterm()
    with run.bind(host, port) as listener:
        llm = open_async_llm(target, speculation, config, chat)
        told = _announcement(llm, settings.model_names[0], target, speculation, config)
        return run.serve(llm, settings, listener, told if settings.log_format == "text" else None)


def _announcement(
    llm: "AsyncLLM",
    name: str,
    target: str | None,
    speculation: SpeculativeConfig | None,
    config: EngineConfig,
) -> Callable[[str], None]:
    """Prints what is served and where, one fact to a line, when given the address."""

    from peagle.device import resolve_device, resolve_dtype
    from peagle.dialects import told_dialect

    def announce(url: str) -> None:
        device = resolve_device(config.device)
        dtype = str(resolve_dtype(config.dtype, device)).removeprefix("torch.")
        facts = {
            "page": f"{url.replace('0.0.0.0', 'localhost').replace('[::]', 'localhost')}/",
            "API": f"{url}/v1 (model {name})",
            "target": target or "the bundled one",
            "drafter": _drafter(llm.llm, speculation),
            "device": f"{device}, {dtype}",
            "answers": told_dialect(llm.llm.dialect, llm.llm.tokenizer, llm.llm.chat_config),
        }
        for fact, value in facts.items():
            typer.echo(f"{fact:<9}{value}", err=True)

    return announce


def _drafter(llm: "LLM", speculation: SpeculativeConfig | None) -> str:
    """The drafter that runs, its method and its K."""
    drafter = llm.engine.facts.drafter
    if speculation is None:
        return "none: every token is the target's own"
    if drafter is None:
        return f"none: drafts are looked up in the text, K = {llm.k}"
    ours = speculation.model == str(bundled("peagle"))
    method = "P-EAGLE" if drafter.parallel else "EAGLE-3"
    also = "" if speculation.lookup is None else ", or drafts looked up in the text"
    if most := llm.engine.facts.most_trees:
        also += f", branching for up to {most} at once"
    return f"{'the bundled one' if ours else speculation.model} ({method}), K = {llm.k}{also}"


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    from peagle.models.chat_template import check_syntax

    try:
        template = path.read_text()
        check_syntax(template)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--chat-template {path}: {reason(error)}") from None
    except InputError as error:
        raise InputError(f"--chat-template {path}: {error}") from None
    return template


def _start_vllm(
    context: typer.Context,
    target: str | None,
    speculation: SpeculativeConfig | None,
    further: Sequence[str],
    secret: str | None,
) -> None:
    from peagle.server.vllm import become, vllm_command

    flags = _given_flags(context)
    environment = dict(os.environ)
    if keep_alive := flags.pop("--timeout-keep-alive", None):
        environment[VLLM_KEEP_ALIVE] = keep_alive[0]
    if secret is not None:
        environment["VLLM_API_KEY"] = secret
    if speculation is not None and context.params["speculative_config"] is None:
        speculation = _as_its_files_say(speculation)
    command = vllm_command(target or str(bundled("target")), speculation, flags, further)
    become(command, environment)


def _as_its_files_say(speculation: SpeculativeConfig) -> SpeculativeConfig:
    """With method and K, which vLLM must be told. Raises `InputError` for what cannot be read."""
    from peagle.drafters.diagnosis import diagnose
    from peagle.models.weights import model_directory

    if speculation.model is None:
        return speculation
    found = diagnose(model_directory(speculation.model))
    if found.config is None:
        raise InputError(f"{speculation.model}: {'; '.join(found.problems)}")
    k = speculation.num_speculative_tokens or found.config.default_k
    stated = {"num_speculative_tokens": k, "parallel_drafting": found.config.parallel}
    return speculation.model_copy(update=stated)


def _given_flags(context: typer.Context) -> dict[str, Sequence[str]]:
    """The given flags with their values; for the others vLLM's own defaults hold."""
    given: dict[str, Sequence[str]] = {}
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if name in KEEP or source is None or source.name == "DEFAULT":
            continue
        flag = flag_name(name)
        if isinstance(value, bool):
            given[flag if value else sagemaker.turned_off(flag)] = ()
        else:
            given[flag] = [str(v) for v in value] if isinstance(value, list) else [str(value)]
    return given
