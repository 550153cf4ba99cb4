"""Every kernel compiles for a Hopper GPU, and those for packed weights fit into a smaller one, on
any machine: the interpreter checks no types."""

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys

from peagle.ops import triton as package

SCRIPT = """
import importlib, re, subprocess, sys, tempfile
from collections import namedtuple
from dataclasses import replace
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from peagle.ops.triton.attention_parts import Contexts
from peagle.ops.triton.cycle_state import Places
from peagle.ops.cycle_state import CycleState, FirstNorms
from peagle.ops.penalties import Penalties
from peagle.ops.triton.product_call import ProductForm, ProductResults, ProductSizes
from peagle.ops.triton.norm import GatedRows, MixtureRows, NormWeights
from peagle.ops.triton.weights import Operands, Packing

HOPPER = GPUTarget("cuda", 90, 32)
BF16, F32, INT = "*bf16", "*fp32", "*i64"
FLAGS = {"OVERLAP": True}
SCALES = namedtuple("Scales", ("keys", "values"))("fp32", "fp32")
DENSE = Packing("dense", 1, 1, 1, 1, False, False, False, 1, 128)
OF_TENSOR = dict.fromkeys(("numbers", "scales", "zeros", "factors"), BF16) | {"weight": Operands}
WIDTHS = ("depth", "outputs", "width", "hidden")
WIDTHS += ("query_stride", "side_stride", "codes_stride", "slots_stride")


def typed(name, types):
    "An argument's type; of a group of arguments, which a named tuple is, those of its fields."
    found = types.get(name, "i32")
    return found(*(typed(n, types) for n in found._fields)) if isinstance(found, type) else found


def attributes(signature, place=()):
    "What is known of pointers and widths, by their places among arguments and in groups."
    known = {}
    for i, (name, kind) in enumerate(signature.items()):
        if isinstance(kind, tuple):
            known |= attributes(kind._asdict(), (*place, i))
        elif kind[0] == "*" or name in WIDTHS:
            known[*place, i] = [["tt.divisibility", 16]]
    return known


def compiled(module, name, types, constants, gpu=HOPPER, **options):
    kernel = getattr(importlib.import_module(f"peagle.ops.triton.{module}"), name)
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else typed(n, types) for n in names}
    places = {(names.index(n),): value for n, value in constants.items()}
    source = ASTSource(kernel, signature, places, attributes(signature))
    made = triton.compile(source, gpu, options)
    print(module, name)
    return made


def spilled(made):
    "Bytes of a thread's registers that did not fit."
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(re.search(r"STACK:(\\d+)", usage)[1])


def product(rows, **flags):
    types = dict.fromkeys(("x", "bias", "stream", "norm", "out", "scaled"), BF16) | OF_TENSOR
    types |= {"squares": F32, "eps": "fp32", "partial": F32, "arrivals": "*i32"}
    types |= {"results": ProductResults, "sizes": ProductSizes}
    few = flags.pop("few", {})
    sizes = {"ROWS": rows, "LINES": 32 * (1 + flags.get("gated", False)), "W": DENSE} | few
    sizes |= {"OVERLAP": flags.get("adds", False), **product_form(128, **flags)}
    warps = 2 if few else 4
    made = compiled("skinny_product", "_product", types, sizes, num_stages=5, num_warps=warps)
    assert spilled(made) == 0, (rows, flags)


FORM = ("gated", "gelu", "adds", "apart")


def product_form(parts, splits=1, **flags):
    form = dict.fromkeys(FORM, False) | {n: flags.pop(n) for n in FORM if n in flags}
    absent = {n: None for n in ("squares", "bias") if n not in flags}
    return {"F": ProductForm(splits, parts, **form), **absent}


product(16, adds=True)
product(32, squares=True, gated=True)
product(16, squares=True, gated=True, gelu=True)
product(16, squares=True, bias=True)
product(64, adds=True, splits=2)
for rows, step in ((16, 256), (64, 128)):
    product(rows, squares=True, splits=8, few={"LINES": 16, "W": replace(DENSE, step=step)})
norm = dict.fromkeys(("summands", "dense", "stream", "scalar", "total", "out"), BF16)
norm |= dict.fromkeys((*NormWeights._fields, *MixtureRows._fields, *GatedRows._fields), BF16)
norm |= {"weights": NormWeights, "read": MixtureRows, "gated": GatedRows}
norm |= dict.fromkeys(("eps", "next_eps", "factor"), "fp32")
for block, count, there in (
    (4096, 1, ()),
    (4096, 1, ("stream",)),
    (2048, 8, ("stream",)),
    (2048, 8, ("stream", "gated", "SCALED")),
    (8192, 1, ("stream", "OWN", "scalar")),  # the 31B's, then the 26B-A4B's
    (4096, 1, ("stream", "OWN", "read")),
    (4096, 8, ("stream", "OWN", "dense", "scalar")),
):
    sizes = {name: name in there for name in ("OWN", "SCALED")}
    absent = ("dense", "stream", "scalar", "read", "gated")
    sizes |= {name: None for name in absent if name not in there}
    sizes |= {"BLOCK": block, "COUNT": count, **FLAGS}
    compiled("norm", "_add_normed", norm, sizes, num_warps=16 if block > 4096 else 8)
for gelu in (False, True):
    compiled("swiglu", "_glu", {"gate_up": BF16, "out": BF16}, {"BLOCK": 2048, "GELU": gelu})

heads = {"HEADS": 32, "KV_HEADS": 8, "SIZE": 128}
types = {"qkv": BF16, "cache": BF16, "positions": INT, "writes": INT, "rotations": F32}
types |= {"norm_weight": BF16, "eps": "fp32", "scales": SCALES}
store = {**FLAGS, "TOGETHER": 32, "NORM": True, "V_NORM": False}
for turned in (128, 96):
    for cache in (BF16, "*fp8e4nv"):
        of_kind = types | {"cache": cache}
        compiled("cached_attention", "_store", of_kind, {**heads, **store, "WIDTH": turned})
GEMMA = (16, 256), (4, 512)  # heads of keys and their sizes, in the 31B
for kv_heads, size in GEMMA:
    wide = {"HEADS": 32, "KV_HEADS": kv_heads, "SIZE": size, "WIDTH": size}
    wide |= store | {"TOGETHER": 4096 // size, "V_NORM": True}
    compiled("cached_attention", "_store", types, wide)
types = dict.fromkeys(("query", "cache", "out", "sinks"), BF16)
types |= dict.fromkeys(("slots", "limits", "requests", "starts", "firsts", "counts"), INT)
types |= {"partial": F32, "arrivals": "*i32", "scale": "fp32", "positions": INT}
types |= {"contexts": Contexts, "scales": SCALES}
types |= {"qkv": BF16, "rotations": F32, "norm_weight": BF16, "eps": "fp32"}
for rows, switch in ((16, False), (32, True), (64, False)):
    sizes = {"GROUP": 4, "PADDED": 4, "ROWS": rows, "KEYS": 64, "PARTS": 8}
    flags = {} if switch else {"window": None, "sinks": None}
    values = {**heads, **FLAGS, **sizes, **flags, "TREE": rows > 16, "CAUSAL": rows < 64}
    for cache in (BF16, "*fp8e4nv"):
        of_kind = types | {"ancestors": "*i32", "cache": cache}
        compiled("cached_attention", "_attend", of_kind, values)
for kv_heads, size in GEMMA:
    heads, group = {"HEADS": 32, "KV_HEADS": kv_heads, "SIZE": size}, min(32 // kv_heads, 4)
    sizes = {"GROUP": group, "PADDED": group, "ROWS": 8 * group, "KEYS": 64, "PARTS": 8}
    flags = {"sinks": None} | ({} if size == 256 else {"window": None})
    values = {**heads, **FLAGS, **sizes, **flags, "TREE": False, "CAUSAL": True}
    options = {"num_warps": 8, "num_stages": 2}
    compiled("cached_attention", "_attend", types | {"ancestors": "*i32"}, values, **options)

state = ("requests", "computed", "pending", "emitted", "slots", "limits", "starts", "firsts")
state += ("counts", "positions", "writes", "reads", "drafts", "chosen", "ks", "results")
types = dict.fromkeys(state, INT)
streams = ("features", "embedding", "input_weight", "hidden_weight", "mask_feature", "x", "stream")
types |= dict.fromkeys((*streams, "weight", "scaled"), BF16)
types |= {"eps": "fp32", "places": Places, "state": CycleState, "norms": FirstNorms}
types |= {"penalties": Penalties, "rates": F32, "before_residual": "i1"}
sizes = {"BATCH": 8, "HIDDEN": 4096, "READS": 8}
compiled("cycle_state", "_draft_inputs", types, {**sizes, "BEFORE": False})
compiled("cycle_state", "_verify_inputs", types, {"HIDDEN": 4096})
sizes = {"COUNT": 8, "WIDTH": 8, "HIDDEN": 4096}
compiled("cycle_state", "_advance", types, sizes)
types = {"logits": BF16, "best": F32, "place": "*i32", "offsets": INT, "out": INT}
compiled("argmax", "_part", types, {"BLOCK": 4096})
compiled("argmax", "_merge", types, {"PARTS": 64})
from peagle.ops.candidates import Candidates
from peagle.ops.draft import Found, Tree
from peagle.ops.triton.draft import PairSides
from peagle.ops.race import Race
from peagle.ops.sampling import Sampling

types = dict.fromkeys(("greedy", "requests", "firsts", "depths", "out"), INT)
table = Sampling(F32, INT, F32, F32, INT)
types |= {"table": table, "race": Race(table, INT, INT)}
for logits in (BF16, F32):
    sizes = {"BLOCK": 8192} | ({} if logits == BF16 else {"depths": None})
    compiled("sampling", "_sample", types | {"logits": logits}, sizes, num_warps=32)
types |= {"best": F32, "place": "*i32", "scores": F32, "found": Candidates}
types |= dict.fromkeys(("ids", "tokens", "offsets"), INT)
types["chosen"] = INT
for logits, bits, races, skips in (
    (BF16, 16, True, True),
    (BF16, 16, True, False),
    (F32, 32, False, False),
):
    raced = 64 if races else 16
    types |= {"logits": logits}
    switches = {"BITS": bits, "SKIPS": skips}
    switches |= {} if races else {"race": None}
    sizes = {**switches, "COUNT": raced, "BLOCK": 4096}
    compiled("candidates", "_part", types, sizes, num_warps=8)
    sizes = {**switches, "COUNT": 16, "RACED": raced, "LANES": 4096}
    merged = compiled("candidates", "_merge", types, sizes, num_warps=8)
    assert spilled(merged) == 0, "64 candidates each of 64 blocks, 262,144 tokens"
types["pairs"] = PairSides
types |= dict.fromkeys(("predecessor", "successor", "gates"), BF16)
for pairs, warps in ((False, 1), (True, 4)):
    sizes = {"COUNT": 16, "RANK": 256} if pairs else {"COUNT": 16, "RANK": 1, "pairs": None}
    compiled("draft", "_draw", types, sizes, num_warps=warps)
    compiled("tree", "_log_share", types | {"out": F32}, sizes, num_warps=1)
types |= {"unbranched": INT, "shares": F32, "tree": Tree(INT, INT, "*i32", "i32")}
compiled("tree", "_grow", types, {"COUNT": 16, "ROWS": 16}, num_warps=1)
types |= dict.fromkeys(("chosen", "path", "drafts", "taken", "reads"), INT)
compiled("tree", "_walk", types, {"ROWS": 16}, num_warps=1)
types = {"cache": BF16} | dict.fromkeys(("slots", "requests", "starts", "limits", "path"), INT)
types["strides"] = namedtuple("Strides", ("layer", "side"))
compiled("tree", "_compact", types, {})
types = dict.fromkeys(("computed", "limits", "requests", "unbranched"), INT) | {"rates": F32}
compiled("tree", "_unbranched", types, {}, num_warps=1)
names = ("requests", "computed", "pending", "emitted", "counts", "best", "tokens", "lengths")
types = {"history": "*i32", "gains": F32, "used": "*i1", "price": "fp32", "forgets": "fp32"}
types |= dict.fromkeys((*names, *CycleState._fields, "drafts", "chosen"), INT)
types |= {"state": CycleState, "penalties": Penalties, "rates": F32, "features": BF16}
types["found"] = Found
compiled("lookup", "_write_newest", types, {"WIDTH": 256})
sizes = {"SHORTEST": 3, "LONGEST": 16, "BLOCK": 1024}
compiled("lookup", "_search", types, sizes)
compiled("lookup", "_follow", types | {"drafts": "i32"}, {"DRAFTS": 8})
compiled("lookup", "_weigh", types, {"ROWS": 512})
types = {"rates": F32, "counts": "*i32", "penalties": Penalties}
types |= dict.fromkeys(("drafts", "requests", "emitted", "numbers"), INT)
for logits in (BF16, F32):
    of_kind = types | {"logits": logits}
    compiled("penalties", "_penalize", of_kind, {"BLOCK": 4096}, num_warps=8)
compiled("penalties", "_count_emitted", types, {"WIDTH": 8}, num_warps=1)
types = dict.fromkeys(("gate_up", "of_result", "out"), BF16)
compiled("swiglu", "_gradient", types, {"BLOCK": 1024})
from peagle.ops.triton.expert_blocks import ExpertSizes, Gates, BlockLayout

experts = {"BLOCK_E": 128}
ints = dict.fromkeys(("order", "blocks", "num_blocks", "chosen"), "*i32") | {"layout": BlockLayout}
sizes = {**experts, "BLOCK_M": 64, "OVERLAP": True}
for chunk in (512, 4096):
    compiled("expert_blocks", "_layout_kernel", ints, {**sizes, "CHUNK": chunk})
types = dict.fromkeys(("x", "weight", "logits", "bias", "factors", "weights"), BF16) | ints
types |= dict.fromkeys(("squares", "partial", "scales"), F32)
types |= {"arrivals": "*i32", "eps": "fp32"}
from peagle.ops.triton.routing import RouterEpilogue, RouterSizes

types["behind"] = RouterEpilogue
for form, rows in ((False, 1), (True, 16)):
    choice = RouterSizes(2048, 128, form, form, 128, 128, 8, True, not form)
    flags = {"C": choice, "R": rows, "OVERLAP": form}
    compiled("routing", "_route_kernel", types, flags)
    compiled("routing", "_route_few_kernel", types, flags)
types = dict.fromkeys(("x", "bias", "out"), BF16) | ints | {"by_row": F32}
packed = {"numbers": "*i16", "results": ProductResults, "sizes": ProductSizes}


def packing(kind, high, wide, columns, run=128, step=128):
    together = 4 if run == 64 else 2
    return Packing(kind, run, high, wide, columns, False, False, False, together, step)


from peagle.ops.triton import experts

forms = ((False, 8, 768, 2048), (True, 4, 2880, 2880), (False, 8, 704, 2816))
for (biased, top_k, columns, depth), pairs in zip(forms, (16, 64, 128)):
    gates = Gates(top_k, 7.0, 1.702, gelu=columns == 704)
    for own, flags in (("_gate_up_kernel", {"G": gates}), ("_down_kernel", {"OVERLAP": biased})):
        split = experts.split_of(torch.empty(0), pairs, "G" in flags)
        sizes = ExpertSizes(columns, depth, pairs, split.lines)
        options = {"num_warps": split.warps, "num_stages": split.stages}
        flags |= {"E": sizes, "W": replace(DENSE, step=split.depth)}
        flags |= {} if biased else {"bias": None}
        flags |= {} if biased or own == "_down_kernel" else {"by_row": None}
        made = compiled("experts", own, types | OF_TENSOR, flags, **options)
        assert spilled(made) == 0, (own, pairs)
cases = [(k, n) for k in ("fp8", "mxfp4") for n in (16, experts.LARGEST_BLOCK)]
for kind, block in cases:
    mxfp4 = kind == "mxfp4"
    tiling = (experts.FOUR_BITS if mxfp4 else experts.EIGHT_BITS)[block > 16]
    depth = 2880 if mxfp4 else 2048
    of_blocks = (1, 32, 96, 64) if mxfp4 else (128, 128, 16)
    sizes = {"E": ExpertSizes(768, depth, block, tiling.lines)}
    sizes["W"] = packing(kind, *of_blocks, step=tiling.depth)
    sizes |= {} if mxfp4 else {"bias": None}
    gates = {"G": Gates(8, 7.0, 1.702, gelu=block == 64)}
    types |= {**packed, "weight": Operands, "by_row": F32}
    types |= dict.fromkeys(("scales", "zeros", "factors"), "*u8" if mxfp4 else F32)
    options = {"num_warps": 4, "num_stages": tiling.stages}
    gate_up = compiled("experts", "_gate_up_kernel", types, {**sizes, **gates}, **options)
    down = {**sizes, "OVERLAP": True}
    down = compiled("experts", "_down_kernel", types, down, **options)
    assert max(map(spilled, (gate_up, down))) <= 64, (kind, block)
types = dict.fromkeys(("x", "bias", "stream", "norm", "out", "scaled"), BF16) | packed
types |= dict.fromkeys(("squares", "scales", "zeros", "factors", "partial"), F32)
types["weight"] = Operands
types |= {"arrivals": "*i32", "eps": "fp32"}
for rows, blocks, flags in (
    (16, 32, {"adds": True, "splits": 4}),
    (64, 32, {"squares": True, "gated": True}),
    (128, 1, {"bias": True}),
):
    sizes = {"W": packing("fp8", 128 if blocks > 1 else 1, 4096 // blocks, blocks)}
    sizes |= {"ROWS": rows, "LINES": 64, **FLAGS}
    constants = {**sizes, **product_form(64, **flags)}
    compiled("skinny_product", "_product", types, constants, num_stages=4)
FOUR_BITS = {
    "nvfp4": Packing("nvfp4", 64, 1, 16, 256, False, True, True, 4, 128),
    "mxfp4": Packing("mxfp4", 64, 1, 32, 128, False, False, False, 4, 128),
    "int4 32": Packing("int4", 128, 1, 32, 128, True, False, False, 4, 128),
    "int4": Packing("int4", 128, 1, 128, 32, False, False, False, 4, 256),
    "int8": Packing("int8", 128, 1, 4096, 1, False, False, False, 2, 128),
}
for name, own in FOUR_BITS.items():
    kinds = "*u8" if own.kind in ("nvfp4", "mxfp4") else BF16
    types |= {"scales": kinds, "zeros": "*u8" if own.zeros else kinds, "factors": F32}
    for rows, flags in ((16, {"adds": True, "splits": 4}), (64, {"squares": True, "gated": True})):
        step = 256 if rows == 16 and own.together == 4 else 128
        constants = {**sizes, **product_form(64, **flags), "W": replace(own, step=step)}
        constants["ROWS"] = rows
        made = compiled("skinny_product", "_product", types, constants, num_stages=4)
        assert spilled(made) == 0, (name, rows)
    compiled("widened", "_widen", {**types, "out": BF16}, {"W": own})
types |= dict.fromkeys(("numbers", "scales", "zeros", "factors"), BF16)
for rows, apart in ((16, False), (128, True)):
    form = product_form(1, splits=4, bias=True, apart=apart)
    constants = {**sizes, "W": DENSE, **form}
    made = compiled("skinny_product", "_product", types, {**constants, "ROWS": rows}, num_stages=3)
    assert spilled(made) == 0, rows
types |= {"numbers": "*i16"} | dict.fromkeys(("scales", "zeros", "factors"), F32)
from peagle.ops.triton import skinny_product

ROOM = 99 << 10  # of an L4, an RTX 4090 or an RTX 5090, for one program
ADA, BLACKWELL = GPUTarget("cuda", 89, 32), GPUTarget("cuda", 120, 32)
kinds = {BF16: torch.bfloat16, F32: torch.float32}
for kind, rows, programs, gpu, most in (
    *((BF16, 16, 1, ADA, ROOM), (BF16, 64, 1, ADA, ROOM), (BF16, 130, 500, ADA, ROOM)),
    *((F32, 16, 1, ADA, ROOM), (F32, 64, 500, ADA, ROOM), (F32, 130, 1, ADA, ROOM)),
    *((BF16, 64, 16, HOPPER, 227 << 10), (BF16, 130, 16, HOPPER, 227 << 10)),
):
    skinny_product.shared_memory = lambda x: most
    x = torch.empty(0, dtype=kinds[kind])
    height = skinny_product.height_for(rows, 128, x)
    room = skinny_product.room_of(x, 64 * 128, 8)
    stages = skinny_product.stages_for(
        programs, skinny_product.step_bytes(height, 128, x), room, processors=58
    )
    types |= dict.fromkeys(("x", "bias", "stream", "norm", "out", "scaled"), kind)
    flags = {"W": packing("fp8", 128, 128, 1), "ROWS": height, "OVERLAP": False}
    flags |= product_form(64, gated=True)
    needed = compiled(
        "skinny_product", "_product", types, {**sizes, **flags}, gpu, num_stages=stages
    ).metadata.shared
    assert needed <= most, (kind, rows, stages, needed)
skinny_product.shared_memory = lambda x: ROOM
types = {**ints, "by_row": F32, "numbers": "*i16", "weight": Operands}
for packed, kind, block in (
    *(("fp8", BF16, 32), ("fp8", BF16, 64), ("fp8", F32, 16)),
    *(("mxfp4", BF16, 32), ("mxfp4", BF16, 64), ("mxfp4", F32, 16)),
):
    mxfp4 = packed == "mxfp4"
    tiling = (experts.FOUR_BITS if mxfp4 else experts.EIGHT_BITS)[block > 32]
    x = torch.empty(0, dtype=kinds[kind])
    stages = experts.stages_for(tiling, 4 if mxfp4 else 8, block, x)
    types |= dict.fromkeys(("x", "bias", "out"), kind)
    types |= dict.fromkeys(("scales", "zeros", "factors"), "*u8" if mxfp4 else F32)
    depth, of_blocks = (2880, (1, 32, 96, 64)) if mxfp4 else (2048, (1, 2048, 1))
    flags = {"E": ExpertSizes(768, depth, block, tiling.lines)}
    flags["W"] = packing(packed, *of_blocks, step=tiling.depth)
    flags["G"] = Gates(8, 7.0, 1.702, gelu=False)
    for gpu in (ADA, BLACKWELL):
        made = compiled("experts", "_gate_up_kernel", types, flags, gpu, num_stages=stages)
        assert made.metadata.shared <= ROOM, (packed, kind, block, stages, gpu)
types = {"x": BF16, "numbers": "*i16", "scales": F32}
for group, groups in ((128, 16), (4096, 1)):
    sizes = {"GROUP": group, "GROUPS": groups, "RUN": 128}
    compiled("quantized_activations", "_quantize", types, sizes)
types = {"draft": BF16, "target": BF16, "which": INT, "weights": F32, "losses": F32}
for kl in (False, True):
    compiled("divergence", "_weigh", types, {"KL": kl, "BLOCK": 4096})

from triton.experimental.gluon._runtime import GluonASTSource
from peagle.ops.triton import hopper_attention, layer_chain
from peagle.ops.triton.layer_chain.products import Added
from peagle.ops.triton.layer_chain.shape import LAYOUT3, LAYOUT4, ChainSizes


def made(kernel, types, constant, value, **options):
    names = kernel.arg_names
    signature = {n: "constexpr" if n == constant else typed(n, types) for n in names}
    places = {(names.index(constant),): value}
    source = GluonASTSource(kernel, signature, places, attributes(signature))
    return triton.compile(source, HOPPER, {**options, "launch_pdl": True})


def boxes(*box):
    return f"tensordesc<bf16{list(box)},{LAYOUT4 if len(box) == 4 else LAYOUT3!r}>"


for rows, qkv in ((8, 6144), (16, 0), (32, 6144), (64, 6144)):
    sizes = {"hidden": 4096, "heads": 4096, "inner": 12288, "qkv": qkv}
    shape = ChainSizes(rows=rows, **sizes, programs=132, stages=3)
    links = shape.links
    types = dict.fromkeys(("stream", "norm", "out", "scaled", "inner", "qkv"), BF16)
    types |= {"added": Added, "added_behind": Added, "squares": F32, "eps": "fp32"}
    weights = ("out_weight", "gate_up_weight", "down_weight", "qkv_weight")
    types |= {n: boxes(*link.box) for n, link in zip(weights, links)}
    inputs = ("attended", "middle_input", "inner_input", "out_input")
    types |= {n: boxes(link.inputs, rows, 64) for n, link in zip(inputs, links)}
    types |= {"qkv_rest": boxes(1, 16, 64), "sums": F32, "arrivals": "*i32"}
    options = {"num_warps": 4, "maxnreg": layer_chain.REGISTERS[rows]}
    kernel = made(layer_chain._chain, types, "SHAPE", shape, **options)
    assert kernel.metadata.shared <= shape.stages * shape.slot + layer_chain.MARGIN
    print("layer_chain", "_chain")

from peagle.ops.products.product import Epilogue
from peagle.ops.triton import hopper_product
from peagle.ops.triton.hopper_product.launches import REGISTERS
from peagle.ops.triton.product_call import ProductCall
from peagle.ops.weight import FP8, INT4, INT8, NVFP4, QuantizedWeight

scales = {FP8: torch.float32, INT4: torch.bfloat16, INT8: torch.float16, NVFP4: torch.float8_e4m3fn}
blocks = {FP8: (128, 128), INT4: (1, 128), INT8: (1, 1024), NVFP4: (1, 16)}
KINDS = {"float32": F32, "bfloat16": BF16, "float16": "*fp16", "float8_e4m3fn": "*u8"}
for form, rows, gated in (
    *((form, 64, gated) for form in scales for gated in (False, True)),
    *((NVFP4, 128, True), (NVFP4, 32, True), (INT4, 32, False)),
):
    high, wide = blocks[form]
    packed = torch.zeros(1024, 1024 * form.bits // 8, dtype=torch.uint8)
    units = torch.ones(1024 // high, 1024 // wide).to(scales[form])
    weight = QuantizedWeight(form, packed, units, (high, wide))
    x = torch.zeros(rows, 1024, dtype=torch.bfloat16)
    # sizes are found as on a GPU, where what kernels have as constants are no numbers
    call = ProductCall(x, None, 0.0, weight, None, x, Epilogue.GATE if gated else Epilogue.NONE)
    assert hopper_product.covers(x, weight) and not hopper_product.takes(call), "few steps"
    shape, _ = hopper_product.divided(call, weight)
    types = dict.fromkeys(("stream", "norm", "out", "scaled", "bias"), BF16)
    types |= {"squares": F32, "partial": F32, "factors": F32, "arrivals": "*i32", "eps": "fp32"}
    types |= dict.fromkeys(("scales", "zeros"), KINDS[str(scales[form])[6:]])
    types |= {"numbers": "*i16", "weight": Operands, "results": ProductResults}
    types |= {"boxes": f"tensordesc<i16[32, {shape.words}],{shape.packed!r}>"}
    types |= {"sizes": ProductSizes}
    types |= {"panels": f"tensordesc<bf16[2, {shape.rows}, 64],{LAYOUT3!r}>"}
    options = {"num_warps": 4, "maxnreg": REGISTERS}
    kernel = made(hopper_product._product, types, "P", shape, **options)
    assert kernel.metadata.shared + 1024 <= 227 << 10
    assert spilled(kernel) <= 16, spilled(kernel)
    print("hopper_product", "_product")

from peagle.ops.triton.hopper_product import few
from peagle.ops.triton.product_call import Addition

for form, epilogue, zeros in (
    *((form, epilogue, False) for form in (INT4, NVFP4) for epilogue in Epilogue),
    (INT4, Epilogue.NONE, True),
):
    packed = torch.zeros(1024, 512, dtype=torch.uint8)
    units = torch.ones(1024, 1024 // blocks[form][1]).to(scales[form])
    points = torch.zeros(1024, 8, dtype=torch.uint8) if zeros else None
    weight = QuantizedWeight(form, packed, units, blocks[form], points)
    x = torch.zeros(8, 1024, dtype=torch.bfloat16)
    addition = Addition(x, x, x, x) if epilogue is Epilogue.ADD else None
    call = ProductCall(x, None, 0.0, weight, None, x, epilogue, addition)
    assert not hopper_product.takes(call), "few steps"
    shape, _ = few.divided(call, weight)
    types = dict.fromkeys(("x", "stream", "norm", "out", "scaled", "bias"), BF16)
    types |= {"squares": F32, "partial": F32, "factors": F32, "arrivals": "*i32", "eps": "fp32"}
    types |= {"scales": "*i32" if form is NVFP4 else BF16, "zeros": "*u8", "numbers": "*i16"}
    types |= {"weight": Operands, "results": ProductResults, "sizes": ProductSizes}
    options = {"num_warps": shape.warps, "maxnreg": REGISTERS}
    kernel = made(few._product, types, "P", shape, **options)
    # two of a multiprocessor, each beside what the driver keeps
    assert few.RESIDENT * (kernel.metadata.shared + 1024) <= 228 << 10
    assert spilled(kernel) <= 24 * zeros, spilled(kernel)
    # words and rows come to registers as products take them, 512 bytes an instruction and warp
    assert len(re.findall("ldmatrix.*x4.shared", kernel.asm["ptx"])) >= 16
    print("few", "_product")

from peagle.ops.delta_net import DeltaHeads, DeltaRows
from peagle.ops.triton.delta_net import DeltaSizes, Inputs

about = dict.fromkeys(("requests", "starts", "firsts", "counts", "accepted", "sure"), INT)
about |= dict.fromkeys(("product", "gates", "kept", "conv", "weight", "given"), BF16)
about |= dict.fromkeys(("state", "brought", "decay", "decay_bias"), F32)
about["eps"] = "fp32"
heads = DeltaHeads(num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128)
about |= {"inputs": Inputs, "spans": DeltaRows, "strides": Inputs("i32", "i32", "i32")}
sizes = {"D": DeltaSizes.of(heads, drafts=7), **FLAGS}
compiled("delta_net", "_norm", about, {**sizes, "HEADS": 4}, num_warps=4)
compiled("delta_net", "_bring", about, {**sizes, "SPANS": 32}, num_warps=1)
for values in (16, 32):
    options = {**sizes, "KEPT": 64, "VALUES": values}
    recur = compiled("delta_net", "_recur", about, options, num_warps=1)
    assert spilled(recur) <= 64, spilled(recur)
    # sums have the same order whatever VALUES is: four lanes share a value's keys
    text = recur.asm["ttgir"]
    name = re.search(rf"\\(tensor<128x{values}xf32, (#\\w+)>\\) -> tensor<{values}xf32", text)[1]
    (lanes,) = re.findall(rf"{name} = .*threadsPerWarp = \\[(\\d+), (\\d+)\\]", text)
    assert lanes == ("4", "8"), lanes

types = dict.fromkeys(("qkv", "cache", "norm_weight", "sinks", "out"), BF16)
types |= dict.fromkeys(("slots", "limits", "requests", "starts", "firsts", "counts"), INT)
types |= {"rotations": F32, "partial": F32, "arrivals": "*i32", "eps": "fp32", "scale": "fp32"}
types |= {"shares": "*i32", "positions": INT, "ancestors": "*i32", "contexts": Contexts}
types |= {"k_scale": "fp32", "v_scale": "fp32"}
ALIKE, UNITS, SCALED = {}, {"narrow": True}, {"narrow": True, "scaled": True, "causal": False}
VALUES = {"v_norm": True, "window": True}
for lines, size, together, tree, keeps in (
    *((8, 128, 1, False, ALIKE), (32, 64, 2, True, ALIKE), (64, 128, 2, False, ALIKE)),
    *((64, 64, 2, True, ALIKE), (8, 128, 4, False, ALIKE), (16, 128, 4, True, ALIKE)),
    *((64, 128, 4, False, ALIKE), (64, 128, 2, True, ALIKE), (64, 128, 4, True, ALIKE)),
    *((64, 128, 1, True, ALIKE), (8, 128, 4, False, UNITS), (64, 128, 2, True, UNITS)),
    *((32, 64, 3, False, SCALED), (64, 128, 2, False, SCALED), (16, 64, 4, True, SCALED)),
    *((32, 128, 3, True, UNITS), (16, 128, 4, True, SCALED)),
    *((8, 256, 1, False, VALUES), (16, 256, 2, False, VALUES), (32, 256, 1, True, ALIKE)),
):
    plain = size >= 128
    sizes = {"heads": 32, "kv_heads": 8, "padded": 4, "size": size, "lines": lines}
    switches = {"norm": plain, "window": not plain, "sinks": not plain, "settled": plain}
    switches |= {"tree": tree, **keeps}
    narrow = "narrow" in keeps
    types |= {"cache": "*fp8e4nv", "codes": "*i16"} if narrow else {"cache": BF16, "codes": BF16}
    tiling = hopper_attention.Tiling(**sizes, **switches, together=together)
    options = {"num_warps": tiling.warps, "maxnreg": tiling.registers}
    kernel = made(hopper_attention._attend_part, types, "TILING", tiling, **options)
    assert together * (kernel.metadata.shared + 1024) <= 228 << 10
    print("hopper_attention", "_attend_part")
types = dict.fromkeys(("starts", "counts", "limits", "requests"), INT) | {"shares": "*i32"}
for few in (False, True):
    sizes = {"KEYS": 64, "MOST": 16, "FEW": few, "REQUESTS": 64, "ITEMS": 128}
    compiled("hopper_attention.division", "_divide", types, {**sizes, **FLAGS}, num_warps=1)

"""


def test_kernels_compile_for_a_hopper_gpu() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.splitlines()) >= kernels()


def kernels() -> set[str]:
    """Every kernel that a module launches, behind the module's name."""
    launched = set()
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        source = inspect.getsource(module)
        names = {name for name in re.findall(r"(?<!\w)(_\w+)\[\(", source) if name in vars(module)}
        launched |= {f"{found.name.rpartition('.')[2]} {name}" for name in names}
    return launched
