"""`peagle serve`: an OpenAI-compatible endpoint.

Examples:
  peagle serve
  peagle serve ./target --drafter ./drafter --k 5
  peagle serve ./target --host 0.0.0.0 --api-key "$KEY" --max-num-seqs 16
"""

import hashlib
import importlib
import logging
import os
import secrets
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from peagle.cli.groups import Flags, fields, from_flags
from peagle.cli.loading import choose_speculation, load_llm, named_pair, open_async_llm
from peagle.cli.options import Hardware, NamedDrafter, Target, Threads, use_threads
from peagle.cli.vllm_command import Command, read_command
from peagle.config import ChatConfig, EngineConfig
from peagle.configuration import PositiveInt, parse_json_option
from peagle.errors import InputError, lacking, reason
from peagle.files import read_yaml, writing
from peagle.pair import bundled, or_bundled
from peagle.server import sagemaker
from peagle.server.settings import ServerSettings
from peagle.speculative_config import METHODS, SpeculativeConfig, speculative_values

if TYPE_CHECKING:
    from peagle.async_llm import AsyncLLM
    from peagle.llm import LLM

BUNDLED_NAME = "peagle-demo"
SIZES = (
    "max_model_len max_num_seqs max_num_batched_tokens gpu_memory_utilization kv_cache_memory "
    "enable_prefix_caching draft_length seed step_timeout"
)
SETTINGS = (
    "max_queue drain_seconds scheduling_policy root_path stream_interval generation_config "
    "log_format audit audit_action audit_dump otlp_traces_endpoint"
)
Sizes = Annotated[dict[str, Any], fields(EngineConfig, SIZES)]
Server = Annotated[dict[str, Any], fields(ServerSettings, SETTINGS)]
Readers = Annotated[dict[str, Any], fields(ChatConfig, "tool_call_parser reasoning_parser")]
SEED_BITS = 62
"""Bits of a seed that is drawn, which leaves room for as many requests."""
KEYS = "PEAGLE_API_KEY", "VLLM_API_KEY"
VLLM_KEEP_ALIVE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
"""vLLM's variable for what it has no flag for."""
KEEP = ("--target", "--drafter", "--k", "--speculative-config", "--engine")
"""Flags that vLLM gets in another form, or not at all."""
DRAFTERS = Path(__file__).with_name("published_drafters.yaml")
"""Published drafters, by what their targets' names hold, the first that fits."""
LOOKUP = '{"method": "ngram", "num_speculative_tokens": 8}'
log = logging.getLogger("peagle.server")


class ServeCommand(TyperCommand):
    """Takes vLLM's command lines; `context.obj` is what was read."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = self.get_params(ctx)
        switches = {option.opts[0] for option in options if option.secondary_opts}
        words = sagemaker.with_environment(args, os.environ, switches)
        ctx.obj = read_command(words, options)
        return super().parse_args(ctx, ctx.obj.words)


class Listening(Flags):
    """Where the server is, what it is called there, who may ask it, and how chats are read."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    served_model_name: list[str] = []
    """Model names in the API. Default: the target as given"""
    api_key: list[str] = []
    """Keys that open the API, any of them, in place of PEAGLE_API_KEY."""
    allowed_origins: str = "[]"
    """JSON list of web origins that may call the API. Default: its own"""
    revision: str | None = None
    """The hub's branch, tag or commit of the target."""
    chat_template: str | None = None
    """Jinja file of the chat template. Default: the tokenizer's own"""
    default_chat_template_kwargs: str = "{}"
    """JSON object of the chat template's variables."""


class Engines(Flags):
    """Whose engines run, and how many processes there are of them and in front of one."""

    data_parallel_size: PositiveInt = 1
    """Engines that share the requests, each with a GPU of its own."""
    api_server_count: PositiveInt = 1
    """Processes that answer HTTP on the port, in front of one engine."""
    engine: Literal["peagle", "vllm"] = "peagle"
    """vllm starts vLLM with these flags and any of its own."""


def serve(
    context: typer.Context,
    *,
    target: Target = None,
    drafting: NamedDrafter,
    listening: Listening,
    sizes: Sizes,
    readers: Readers,
    server: Server,
    timeout_keep_alive: Annotated[
        int,
        typer.Option(help="Seconds that an idle connection stays open.", envvar=VLLM_KEEP_ALIVE),
    ] = 180,
    hardware: Hardware,
    threads: Threads = None,
    engines: Engines,
) -> int | None:
    """Serve a target and its drafter behind OpenAI's API.

    By default the bundled pair. The page at / shows which tokens the drafter wrote.
    """
    command: Command = context.obj
    secret = None if listening.api_key else _environments_key()
    if engines.engine == "vllm":
        _start_vllm(target, drafting, command, secret)
        return None
    with from_flags(model_names="--served-model-name", api_keys="--api-key"):
        settings = ServerSettings(
            model_names=tuple(listening.served_model_name or [target or BUNDLED_NAME]),
            api_keys=tuple(listening.api_key) if secret is None else (secret,),
            allowed_origins=parse_json_option(
                "--allowed-origins", listening.allowed_origins, '["https://chat.example"]'
            ),
            timeout_keep_alive=timeout_keep_alive,
            **server,
        )
        chat = ChatConfig(
            chat_template=_read_template(listening.chat_template),
            default_chat_template_kwargs=parse_json_option(
                "--default-chat-template-kwargs",
                listening.default_chat_template_kwargs,
                '{"enable_thinking": false}',
            ),
            **readers,
        )
        drawn: dict[str, Any] = {"seed": secrets.randbits(SEED_BITS)}
        config = EngineConfig(**drawn | sizes, **hardware)
    _check_audit(settings, drafting)
    run = _part("run", "the server", "serve")
    if settings.otlp_traces_endpoint is not None:
        _part("spans", "--otlp-traces-endpoint", "otel")
    run.set_up_log(settings.log_format)
    for line in command.said:
        log.warning(line)
    place, speculation = _pair(target, listening.revision, drafting)
    use_threads(threads)
    run.end_on_sigterm()
    about = (settings.model_names[0], place, speculation, config)
    told = partial(_announce, *about) if settings.log_format == "text" else None
    host, port, count = listening.host, listening.port, engines.api_server_count
    if several := count > 1:
        if engines.data_parallel_size > 1 or sys.platform != "linux":
            raise InputError("--api-server-count above 1: on Linux alone, and for one engine")
        run.bind(host, port).close()  # a shared one would not notice another server
    # a taken port is told before minutes of loading
    with run.bind(host, port, several) as listener:
        if several:
            whole = load_llm(place, speculation, config, chat, fronts=count)
            return run.serve_fronts(whole, settings, listener, told)
        llm = open_async_llm(place, speculation, config, chat, engines.data_parallel_size)
        return run.serve(llm, settings, listener, told)


def _check_audit(settings: ServerSettings, drafting: NamedDrafter) -> None:
    """Raise `InputError` for audits that would find nothing but what was asked for, and for a
    directory that cannot be written."""
    if settings.audit and "synthetic" in (drafting.speculative_config or ""):
        raise InputError("--audit: drafts are accepted by given rates, so every answer differs")
    if settings.audit_dump is not None:
        try:
            Path(settings.audit_dump).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--audit-dump {settings.audit_dump}: {reason(error)}") from None


def _part(module: str, what: str, extra: str) -> Any:
    """A module of the server, whose libraries, which an extra brings, may lack."""
    try:
        return importlib.import_module(f"peagle.server.{module}")
    except ModuleNotFoundError as error:
        raise InputError(lacking(f"{what} needs {error.name}", extra)) from None


def _pair(
    target: str | None, revision: str | None, drafting: NamedDrafter
) -> tuple[str | None, SpeculativeConfig | None]:
    """What is served, and how it speculates; the log tells if it does not."""
    place, drafting = named_pair(target, drafting)
    speculation = choose_speculation(place, drafting)
    if place is None:
        return None, speculation
    if speculation is None:
        log.warning(f"no drafter: every token is the target's own; {_would_draft(place)}")
    if revision is None:
        return place, speculation
    from peagle.models.weights import model_directory

    return str(model_directory(place, revision=revision)), speculation


def _would_draft(target: str) -> str:
    """What would draft for a target."""
    for name, drafter in read_yaml(DRAFTERS).items():
        if name in target.lower():
            return f"--drafter {drafter} drafts for it"
    return f"--drafter DRAFTER drafts, or without any --speculative-config '{LOOKUP}'"


def _environments_key() -> str | None:
    """The key in an environment variable, hidden from other users; the whole value is one key."""
    name = next((name for name in KEYS if name in os.environ), "")
    key = os.environ.get(name, "").strip()
    if name and not key:
        raise InputError(f"{name} is empty; give a key, or unset it to let everyone in")
    return key or None


def _announce(
    name: str,
    target: str | None,
    speculation: SpeculativeConfig | None,
    config: EngineConfig,
    llm: "AsyncLLM",
    url: str,
) -> None:
    """Print what is served and where, one fact to a line."""

    from peagle.dialects.detection import told_dialect

    engine = llm.llm.engine  # in a fork torch does not see the device
    device = config.device.replace("auto", "cuda" if engine.runs_ahead else "cpu")
    dtype = "float32" if engine.facts.is_exact else "bfloat16"
    count = len(engine.replicas)
    facts = {
        "page": f"{url.replace('0.0.0.0', 'localhost').replace('[::]', 'localhost')}/",
        "API": f"{url}/v1 (model {name})",
        "target": (target or "the bundled one") + (f" with {config.lora}" if config.lora else ""),
        "drafter": _drafter(llm.llm, speculation),
        "device": f"{device}, {dtype}" + (f", {count} engines" if count > 1 else ""),
        "answers": told_dialect(llm.llm.dialect, llm.llm.tokenizer, llm.llm.chat_config),
    }
    for fact, value in facts.items():
        typer.echo(f"{fact:<9}{value}", err=True)


def _drafter(llm: "LLM", speculation: SpeculativeConfig | None) -> str:
    """The drafter that runs, its method and its K."""
    drafter = llm.engine.facts.drafter
    if speculation is None:
        return "none: every token is the target's own"
    if drafter is None and speculation.method not in METHODS:
        return f"none: {speculation.method} drafts, a proposer of another package, K = {llm.k}"
    if drafter is None:
        return f"none: drafts are looked up in the text, K = {llm.k}"
    ours = speculation.model == str(bundled("peagle"))
    most = llm.engine.facts.most_trees
    also = f", branching for up to {most} at once" if most else ""
    place = "the bundled one" if ours else speculation.model or "the target's own head"
    return f"{place} ({drafter.kind.name}), K = {llm.k}{also}"


def _read_template(given: str | None) -> str | None:
    """A template's text, from its file or given itself."""
    if given is None:
        return None
    from peagle.models.chat_template import check_syntax

    try:
        template = given if "{{" in given or "{%" in given else Path(given).read_text()
        check_syntax(template)
    except (OSError, UnicodeDecodeError, InputError) as error:
        raise InputError(f"--chat-template {given}: {reason(error)}") from None
    return template


def _start_vllm(
    target: str | None, drafting: NamedDrafter, command: Command, secret: str | None
) -> None:
    from peagle.server.vllm import become, vllm_command

    stated = None
    if drafting.speculative_config is not None:
        stated = speculative_values(drafting.speculative_config)
    elif speculation := choose_speculation(target, drafting):
        stated = _as_its_files_say(speculation).model_dump(exclude_none=True)
    stated = stated and _as_vllm_reads(stated)
    flags = {name: values for name, values in command.flags.items() if name not in KEEP}
    environment = dict(os.environ)
    if keep_alive := flags.pop("--timeout-keep-alive", None):
        environment[VLLM_KEEP_ALIVE] = keep_alive[0]
    if secret is not None:
        environment["VLLM_API_KEY"] = secret
    whole = vllm_command(or_bundled(target, "target"), stated, flags, command.vllms)
    become(whole, environment)


def _as_vllm_reads(stated: dict[str, Any]) -> dict[str, Any]:
    """With a copy among the user's cached files in place of a drafter whose products are packed."""
    drafter = Path(str(stated.get("model")))
    if stated.get("method") != "eagle3" or not (drafter / "config.json").is_file():
        return stated
    from peagle.drafters.checkpoint import unpacked

    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    own = hashlib.sha256(bytes(drafter.resolve())).hexdigest()[:16]
    copy = caches / "peagle" / "unpacked" / own
    with writing(copy, "XDG_CACHE_HOME names another place for it"):
        given = unpacked(drafter, copy)
    if given != copy:
        return stated
    typer.echo(f"vLLM reads no packed drafter: it is given {copy}, in bfloat16", err=True)
    return {**stated, "model": str(copy)}


def _as_its_files_say(speculation: SpeculativeConfig) -> SpeculativeConfig:
    """With method and K, which vLLM must be told. Raises `InputError` for what cannot be read."""
    from peagle.drafters.diagnosis import diagnose
    from peagle.drafters.kind import KINDS
    from peagle.models.weights import model_directory

    if speculation.model is None:
        return speculation
    found = diagnose(model_directory(speculation.model))
    if found.config is None:
        raise InputError(f"{speculation.model}: {'; '.join(found.problems)}")
    k = speculation.num_speculative_tokens or found.config.default_k
    kind = found.config.kind
    eagle = {"parallel_drafting": kind.parallel_drafting}
    told = eagle if kind in KINDS else {"method": kind.method}
    return speculation.model_copy(update={"num_speculative_tokens": k, **told})
