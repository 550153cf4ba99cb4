"""vLLM's flags of `serve` that are not ours, from vLLM 0.33's parser: what becomes of each here."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from peagle.errors import InputError

Flags = Mapping[str, str]
"""What is said -> the flags of which it is said, without their dashes.

`x` is a switch, `x=` takes a value, `x=+` several, and `x/-y` has a short form. Of a switch's off
form, and of the values `a` and `b` in `x=a|b`, nothing is said: they ask for what happens anyway.
`x~a|b` are values of a flag of ours.
"""
IGNORED: Flags = {
    "": """
    aggregate-engine-logging all2all-backend= allow-deprecated-quantization async-scheduling
    cohere-format= cohere-is-reasoning-model cp-kv-cache-interleave-size=
    cpu-distributed-timeout-seconds= data-parallel-address/-dpa= data-parallel-backend/-dpb=
    data-parallel-rpc-port/-dpp= data-parallel-supervisor-port= dbo-decode-token-threshold=
    dbo-prefill-token-threshold= dcp-comm-backend= dcp-kv-cache-interleave-size= dcp-q-replicate
    disable-cascade-attn disable-custom-all-reduce disable-hybrid-kv-cache-manager
    disable-log-stats disable-nccl-for-dp-synchronization distributed-executor-backend=
    distributed-timeout-seconds= dp-supervisor-probe-failure-threshold=
    dp-supervisor-probe-interval-s= dp-supervisor-probe-timeout-s= dp-sync-interval=
    ec-manager-config= elastic-ep-max-dp-size= enable-auto-tool-choice
    enable-batch-sharded-sampling enable-chunked-prefill enable-cumem-allocator enable-dbo
    enable-elastic-ep enable-ep-weight-filter enable-eplb enable-expert-parallel/-ep
    enable-flash-late-interaction enable-hc-sp enable-log-deltas
    enable-mamba-shared-prefix-checkpoint enable-mixed-moe-lora-format enable-moe-shared-loras
    enable-nccl-comm-suspend enable-prompt-tokens-details enable-reasoning
    enable-request-id-headers enable-server-load-tracking enable-shm-tensor-arena
    enable-tower-connector-lora eplb-config= exclude-tools-when-tool-choice-none
    expert-placement-strategy= fail-on-environ-validation fault-tolerance-config=
    fully-sharded-loras ignore-patterns=+ jit-monitor-mode= jit-monitor-verbose
    kv-cache-metrics-sample= kv-offloading-backend=
    kv-sharing-fast-prefill language-model-only log-error-stack lora-dtype= lora-target-modules=+
    mamba-block-size= mamba-cache-mode= mamba-cache-philox-rounds= master-addr= master-port=
    max-cpu-loras= max-log-len= max-lora-cls-labels= max-lora-rank= max-loras=
    max-model-len~auto|-1 max-parallel-loading-workers= model-loader-extra-config= numa-bind
    numa-bind-cpus=+ numa-bind-nodes=+ prefix-cache-retention-interval= prefix-caching-hash-algo=
    prefix-match-unit= pt-load-map-location= ray-workers-use-nsight renderer-num-workers=
    replayssm-buffer-len= safetensors-load-strategy= safetensors-prefetch-block-size=
    safetensors-prefetch-num-threads= scheduler-reserve-full-isl
    show-hidden-metrics-for-version= sleep-mode-backend= sleep-mode-offload-cudagraph
    sleep-preserve-parameter-names=+ specialize-active-lora swa-bounded-replay swap-space=
    ubatch-size= use-replayssm use-tqdm-on-load uvicorn-log-level= watchdog-config= watermark=""",
    "peagle chooses this itself": """
    additional-config={} api-server-count/-asc=1 attention-backend= attention-config/-ac=
    block-size=16 compilation-config/-cc= cuda-graph-sizes=+ cudagraph-capture-sizes=+
    enable-flashinfer-autotune enable-mamba-cache-stochastic-rounding enforce-eager
    gdn-prefill-backend= guided-decoding-backend= h11-max-header-count=
    h11-max-incomplete-event-size= ir-op-priority= kda-decode-backend= kda-prefill-backend=
    kernel-config= linear-backend=auto long-prefill-token-threshold-adaptive
    long-prefill-token-threshold=0 mamba-backend= mamba-cache-dtype=auto mamba-ssm-cache-dtype=auto
    mamba-ssu-algorithm= max-cudagraph-capture-size= max-num-active-seqs= max-num-scheduled-tokens=
    max-seq-len-to-capture= model-impl=auto|vllm moe-backend=auto monokernel optimization-level/-O=
    performance-mode=balanced prefill-schedule-interval=1 sparse-indexer-topk-backend=auto
    sse-keep-alive-interval=15 structured-outputs-config= use-fp64-gumbel""",
    "peagle has nothing of the kind": """
    collect-detailed-traces=+ cudagraph-metrics custom-histogram-buckets= disable-fastapi-docs
    enable-layerwise-nvtx-tracing enable-logging-iteration-details enable-mfu-metrics
    enable-offline-docs enable-tokenizer-info-endpoint
    fingerprint-mode=none fingerprint-value= kv-cache-metrics
    per-request-spec-decode-metrics=none profiler-config= reasoning-config=
    trust-request-chat-template""",
    "a request that sends return_metrics gets them": "enable-per-request-metrics",
    "16 bits are bfloat16": "dtype~float16|half kv-cache-dtype~float16",
    "keys and values of all layers have one type": "kv-cache-dtype-skip-layers=+",
    "weights keep the format of their files": "quantization-config= quantization/-q=",
    "weights, keys and values stay on the device": """
    cpu-offload-gb=0 cpu-offload-params=+ kv-offloading-size= offload-backend=auto
    offload-group-size=0 offload-num-in-group= offload-params=+ offload-prefetch-step=""",
    "no code of a model's directory is ever run": "code-revision= trust-remote-code",
    "the tokenizer is the target's own": "tokenizer-revision= tokenizer=",
    "images, sound and video are refused": """
    allowed-local-media-path= allowed-media-domains=+ disable-chunked-mm-input enable-mm-embeds
    interleave-mm-strings limit-mm-per-prompt= media-io-kwargs= mm-device-do-normalize
    mm-encoder-attn-backend= mm-encoder-attn-dtype= mm-encoder-fp8-scale-path=
    mm-encoder-fp8-scale-save-margin= mm-encoder-fp8-scale-save-path= mm-encoder-tp-mode=
    mm-hasher-algorithm= mm-ipc-gpu-memory-gb= mm-processor-cache-gb= mm-processor-cache-type=
    mm-processor-device= mm-processor-kwargs= mm-shm-cache-max-object-size-mb= mm-tensor-ipc=
    skip-mm-profiling trust-request-mm-kwargs video-pruning-method= video-pruning-rate=""",
    "templates get the text of all parts": "chat-template-content-format=auto|string",
    "a request may ask for 20 log-probabilities": "max-logprobs=20",
    "pages may send GET, HEAD and POST with any header, and no cookies": """
    allow-credentials allowed-headers=["*"] allowed-methods=["*"]""",
    "the log has a line for each request, and nothing of its text": """
    disable-access-log-for-endpoints= disable-uvicorn-access-log enable-log-outputs
    enable-log-requests log-config-file= log-level=INFO|info logging-config=""",
}
"""These change no answer, or none here: accepted."""
REPLACED: Flags = {
    "give --device cuda:N": "device-ids=",
    "give --dtype float32": "dtype~float",
    "give --kv-cache-dtype fp8": "kv-cache-dtype~fp8_e5m2|fp8_inc|fp8_per_token_head",
    "give --host and --port": "uds=",
    "give --kv-cache-memory": "num-gpu-blocks-override=",
    "give --max-queue, the most that wait": "max-num-queued-reqs= max-num-queued-tokens=",
    "give --speculative-config": "spec-method=eagle3",
    "set HF_HUB_CACHE": "download-dir=",
    "set HF_TOKEN": "hf-token=",
    "let requests ask for it": """
    enable-force-include-usage return-tokens-as-token-ids tool-strict-level=auto""",
    "let clients run the tools": "tool-server=",
    "put a proxy with TLS in front": """
    enable-ssl-refresh ssl-ca-certs= ssl-cert-reqs=0 ssl-certfile= ssl-ciphers= ssl-keyfile=""",
    "change config.json in a copy of the target's directory": """
    config-format=auto|hf hf-config-path= hf-overrides={} model-class-overrides={} rope-scaling=
    rope-theta=""",
    "save the weights as safetensors": """
    load-format=auto|fastsafetensors|hf|instanttensor|runai_streamer|safetensors""",
    "save the tokenizer by transformers": "tokenizer-mode=auto|hf",
}
"""Something here takes their place: refused with it."""
LEFT_TO_VLLM: Flags = {
    "peagle's engine uses one GPU": """
    data-parallel-external-lb/-dpe data-parallel-hybrid-lb/-dph
    data-parallel-multi-port-external-lb/-dpm data-parallel-rank/-dpn=
    data-parallel-size-local/-dpl=1 data-parallel-start-rank/-dpr=
    decode-context-parallel-size/-dcp=1 headless nnodes/-n=1 node-rank/-r=0
    pipeline-parallel-size/-pp=1 prefill-context-parallel-size/-pcp=1
    tensor-parallel-size/-tp/--tp=1""",
    "peagle serves one model's text": """
    convert=auto|none default-mm-loras= diffusion-config/-dc= enable-lora enable-prompt-embeds
    io-processor-plugin= lora-modules=+ mm-encoder-only pooler-config= runner=auto|generate
    skip-tokenizer-init task=auto|generate""",
    "peagle runs no code from elsewhere": """
    logits-processors=+ middleware= reasoning-parser-plugin= scheduler-cls= tool-parser-plugin=
    worker-cls=auto worker-extension-cls=""",
    "peagle has nothing of the kind": """
    anthropic-disabled-thinking-effort=auto aux-output-config= disable-sliding-window
    ec-transfer-config= enable-fault-tolerance enable-return-routed-experts enable-scale-out
    enable-sleep-mode enable-trace-replay engram-config= grpc grpc-port= kv-events-config=
    kv-transfer-config= logprobs-mode=raw_logprobs override-generation-config={}
    reasoning-effort-map={} response-role=assistant return-sampling-mask tokens-only
    watermark-config= weight-transfer-config=""",
}
"""These cannot be kept: refused with the command that starts vLLM."""
ENTRY = re.compile(r"([^\s=~]+)([=~]?)(\S*)")
"""A flag's names, what it takes, and values."""
OPPOSITES = {"enable-": "disable-", "disable-": "enable-"}


class Flag(NamedTuple):
    """A flag of a command line."""

    name: str
    takes: str = ""
    """Nothing; = for a value; =+ for several."""
    anyway: frozenset[str] = frozenset()
    """Values that ask for what happens anyway."""
    table: Flags | None = None
    """The one that holds it, if it is vLLM's."""
    reason: str = ""

    def left_out(self, name: str, values: Sequence[str], start: str) -> str | None:
        """What is said of the flag, which is left out, if anything.

        name, values: as they were given. start: the command that starts vLLM with them. Raises
        `InputError` for a flag that cannot be left out.
        """
        if not self.reason or (values and self.anyway.issuperset(values)):
            return None
        told = f"{' '.join([name, *values])}: {self.reason}"
        if self.table is IGNORED:
            return told
        raise InputError(f"{told}; with vLLM: {start}" if self.table is LEFT_TO_VLLM else told)


@cache
def vllm_flags() -> dict[str, Flag]:
    """The tables' flags by each of their names, and ours by name and value."""
    known: dict[str, Flag] = {}
    for table in (IGNORED, REPLACED, LEFT_TO_VLLM):
        for reason, entries in table.items():
            for names, takes, values in ENTRY.findall(entries):
                name, *others = f"--{names}".split("/")
                each = values.split("|")
                anyway = frozenset(each if takes == "=" else ())
                flag = Flag(name, takes + "+" * (values == "+"), anyway, table, reason)
                told = [f"{name} {value}" for value in each] if takes == "~" else [name, *others]
                off = [] if takes else off_names(name)
                known |= dict.fromkeys(told, flag) | dict.fromkeys(off, Flag(name, table=IGNORED))
    return known


def off_names(switch: str) -> list[str]:
    """What turns a switch off in vLLM."""
    name = switch.removeprefix("--")
    pairs = [(on, off) for on, off in OPPOSITES.items() if name.startswith(on)]
    return [f"--no-{name}", *(f"--{off}{name.removeprefix(on)}" for on, off in pairs)]
