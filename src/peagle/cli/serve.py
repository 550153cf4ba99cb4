"""`peagle serve`: an OpenAI-compatible endpoint."""

import inspect
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from peagle.cli.loading import choose_speculation, open_async_llm
from peagle.cli.options import Device, DTypeName, Threads, flag_name, from_flags, use_threads
from peagle.config import (
    ChatConfig,
    DraftLengthMode,
    EngineConfig,
    SpeculativeConfig,
    parse_json_option,
)
from peagle.errors import InputError, lacking, reason
from peagle.pair import bundled
from peagle.server import sagemaker

if TYPE_CHECKING:
    from peagle.server.settings import ServerSettings

EXAMPLE = """\b
Examples:
  peagle serve
  peagle serve ./target --speculative-config '{"method": "eagle3", "model": "./drafter"}'
  peagle serve ./target --host 0.0.0.0 --api-key "$KEY" --max-num-seqs 16"""
BUNDLED_NAME = "peagle-demo"
CONFIG = EngineConfig()
SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}
"""Lets vLLM's own flags through to it."""
KEY = "PEAGLE_API_KEY"
KEEP = ("target", "speculative_config", "engine")
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
    parameters = inspect.signature(serve).parameters.items()
    return {flag_name(name) for name, one in parameters if isinstance(one.default, bool)}


def _names_target(arguments: Sequence[str]) -> bool:
    return bool(arguments) and not arguments[0].startswith("-")


def serve(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(help="Target model: directory or hub id.", show_default="the bundled one"),
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help="vLLM's JSON: the drafter and its K.",
            show_default="the bundled P-EAGLE; none with your own target",
        ),
    ] = None,
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
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of prompt and output together.", show_default="the target's"
        ),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Most requests that run at once.")
    ] = CONFIG.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most target rows in one pass.",
            show_default="2048, half of it for prompts; on a GPU 8192",
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of the GPU's memory that may be used.")
    ] = CONFIG.gpu_memory_utilization,
    kv_cache_memory: Annotated[
        int | None,
        typer.Option(help="Bytes for the KV cache.", show_default="1 GiB, or what the GPU leaves"),
    ] = None,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Reuse the KV of shared prompt prefixes.")
    ] = True,
    draft_length: Annotated[
        DraftLengthMode,
        typer.Option(help="auto: on a GPU, as many drafts, up to K, as are fastest."),
    ] = CONFIG.draft_length,
    seed: Annotated[int, typer.Option(help="Seed of requests without one.")] = CONFIG.seed,
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
        int, typer.Option(help="Most requests that wait; further ones get 429.")
    ] = 256,
    drain_seconds: Annotated[
        float, typer.Option(help="Seconds to finish requests after SIGTERM.")
    ] = 30.0,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Form of log lines.")
    ] = "text",
    dtype: DTypeName = "auto",
    device: Device = "auto",
    threads: Threads = None,
    engine: Annotated[
        Literal["peagle", "vllm"],
        typer.Option(help="vllm starts vLLM with these flags and any of its own."),
    ] = "peagle",
) -> int | None:
    """Serve a target and its drafter behind OpenAI's API.

    By default the bundled pair. The page at / shows which tokens the drafter wrote.
    """
    ours = engine == "peagle"
    if target is not None and target.startswith("-"):
        if ours:
            raise _unknown(context, target)
        raise InputError(f"no such option: {target}; vLLM's own come after the target")
    speculation = choose_speculation(target, speculative_config)
    secret = None if api_key else _key_of(os.environ)
    if not ours:
        _start_vllm(context, target, speculation, secret)
        return None
    if context.args:
        raise _unknown(context, context.args[0])
    from peagle.server.settings import ServerSettings

    with from_flags(model_names="--served-model-name", api_keys="--api-key"):
        settings = ServerSettings(
            model_names=tuple(served_model_name or [target or BUNDLED_NAME]),
            api_keys=tuple(api_key or ()) if secret is None else (secret,),
            allowed_origins=parse_json_option(
                "--allowed-origins", allowed_origins or "[]", '["https://chat.example"]'
            ),
            max_queue=max_queue,
            drain_seconds=drain_seconds,
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
        config = EngineConfig(
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory=kv_cache_memory,
            enable_prefix_caching=enable_prefix_caching,
            draft_length=draft_length,
            seed=seed,
        )
    use_threads(threads)
    return _serve(target, speculation, config, chat, settings, host, port)


def _unknown(context: typer.Context, word: str) -> InputError:
    """For a word that is left over, with the option that was perhaps meant."""
    if not word.startswith("-"):
        return InputError(f"unexpected argument: {word}")
    word = word.partition("=")[0]
    options = [option for parameter in context.command.params for option in parameter.opts]
    near = get_close_matches(word, options, n=1)
    return InputError(f"no such option: {word}" + "".join(f" (did you mean {n}?)" for n in near))


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
        return run.serve(llm, settings, listener)


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--chat-template {path}: {reason(error)}") from None


def _start_vllm(
    context: typer.Context,
    target: str | None,
    speculation: SpeculativeConfig | None,
    secret: str | None,
) -> None:
    from peagle.server.vllm import become, vllm_command

    flags = _given_flags(context)
    command = vllm_command(target or str(bundled("target")), speculation, flags, context.args)
    become(command, os.environ if secret is None else {**os.environ, "VLLM_API_KEY": secret})


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
