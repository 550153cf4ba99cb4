"""Write `formats.safetensors`: small weights as their writers' own code packs and reads them.

It needs compressed-tensors 0.17, nvidia-modelopt 0.47 and AutoAWQ's `packing_utils`; tests do not.
`X.dense` is what the writer's reader makes of `X`'s other tensors in float32; scales are widened
before, since readers multiply in the type of the scales. GPTQ's packer and reader are written out
here by the formulas of gptqmodel's torch kernel.
"""

from pathlib import Path

import torch
from awq.utils.packing_utils import AWQ_ORDER, dequantize_gemm
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import save_file
from torch import Tensor

OUTPUTS = 12
Tensors = dict[str, Tensor]


def weight(outputs: int, depth: int) -> Tensor:
    return torch.randn(outputs, depth) * torch.rand(outputs, 1)


def compressed(form: str, depth: int, **settings: object) -> Tensors:
    """What compressed-tensors writes of a weight, scales in bfloat16 as of a model in it."""
    args = QuantizationArgs(**settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(form)
    values = weight(OUTPUTS, depth)
    groups = values.unflatten(1, (-1, args.group_size or depth))
    shared = {}
    if args.type == "float" and args.group_size == 16:
        shared["weight_global_scale"] = generate_gparam(values.amin(), values.amax())
    limits = groups.amin(2), groups.amax(2)
    scale, zero = calculate_qparams(*limits, args, shared.get("weight_global_scale"))
    state = {"weight": values, "weight_scale": scale, "weight_zero_point": zero, **shared}
    if args.type == "int":
        state["weight_scale"] = scale.bfloat16().float()
    written = compressor.compress(state, scheme)
    dense = compressor.decompress(written, scheme)["weight"]
    if args.type == "int":
        written["weight_scale"] = scale.bfloat16()
    if form == "nvfp4-pack-quantized":  # its reader answers in bfloat16 alone
        dense = nvfp4_in_float32(written)
    return {**written, "dense": dense.float()}


def nvfp4_in_float32(written: Tensors) -> Tensor:
    """The reader's own steps on numbers and scales in float32."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    packed = written["weight_packed"]
    numbers = unpack_fp4_from_uint8(packed, len(packed), packed.shape[1] * 2).float()
    scales, shared = written["weight_scale"].float(), written["weight_global_scale"]
    return dequantize(x_q=numbers, scale=scales, global_scale=shared, dtype=torch.float32)


def modelopt(depth: int) -> Tensors:
    values = weight(OUTPUTS, depth)
    packed, scale, shared = NVFP4QTensor.quantize(values, 16)
    dense = NVFP4QTensor(values.shape, torch.float32, packed._quantized_data).dequantize(
        torch.float32, scale=scale, double_scale=shared, block_sizes={-1: 16}
    )
    written = {"weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": shared}
    return {**written, "dense": dense}


def awq(outputs: int, depth: int, group: int) -> Tensors:
    codes = torch.randint(0, 16, (depth, outputs), dtype=torch.int32)
    zeros = torch.randint(0, 16, (depth // group, outputs), dtype=torch.int32)
    scales = (torch.rand(depth // group, outputs) * 0.1).half()

    def packed(given: Tensor) -> Tensor:
        words = torch.zeros(len(given), outputs // 8, dtype=torch.int32)
        for place, output in enumerate(AWQ_ORDER):
            words |= given[:, output::8] << 4 * place
        return words

    tensors = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}
    dense = dequantize_gemm(tensors["qweight"], tensors["qzeros"], scales.float(), 4, group)
    return {**tensors, "dense": dense.T}


def gptq(outputs: int, depth: int, group: int, bits: int, symmetric: bool, less: int) -> Tensors:
    together, middle = 32 // bits, 1 << bits - 1
    codes = torch.randint(0, 2 * middle, (depth, outputs), dtype=torch.int32)
    zeros = torch.randint(0, 2 * middle, (depth // group, outputs), dtype=torch.int32)
    if symmetric:
        zeros.fill_(middle)
    scales = (torch.rand(depth // group, outputs) * 0.1).half()
    words = torch.zeros(depth // together, outputs, dtype=torch.int32)
    of_zeros = torch.zeros(depth // group, outputs // together, dtype=torch.int32)
    for place in range(together):
        words |= codes[place::together] << bits * place
        of_zeros |= (zeros[:, place::together] - less) << bits * place
    order = torch.arange(depth, dtype=torch.int32) // group
    dense = scales.float()[order] * (codes - zeros[order]).float()
    tensors = {"qweight": words, "qzeros": of_zeros, "scales": scales, "g_idx": order}
    return {**tensors, "dense": dense.T}


def main() -> None:
    torch.manual_seed(0)
    group = {"num_bits": 4, "type": "int", "strategy": "group"}
    pack = "pack-quantized"
    cases = {
        "int4": compressed(pack, 256, **group, group_size=128),
        "int4_32": compressed(pack, 160, **group, group_size=32),
        "int4_64_asym": compressed(pack, 128, **group, group_size=64, symmetric=False),
        "int4_channel": compressed(pack, 96, num_bits=4, type="int", strategy="channel"),
        "int8_packed": compressed(
            pack, 128, num_bits=8, type="int", strategy="group", group_size=128
        ),
        "int8_packed_asym": compressed(
            pack, 64, num_bits=8, type="int", strategy="channel", symmetric=False
        ),
        "int8": compressed("int-quantized", 128, num_bits=8, type="int", strategy="channel"),
        "nvfp4_compressed": compressed(
            "nvfp4-pack-quantized",
            144,
            num_bits=4,
            type="float",
            strategy="tensor_group",
            group_size=16,
        ),
        "mxfp4_compressed": compressed(
            "mxfp4-pack-quantized", 96, num_bits=4, type="float", strategy="group", group_size=32
        ),
        "nvfp4_modelopt": modelopt(144),
        "awq": awq(16, 128, 64),
        "gptq": gptq(16, 128, 64, 4, True, 1),
        "gptq_v2": gptq(16, 128, 32, 4, False, 0),
        "gptq_8": gptq(16, 64, 64, 8, True, 1),
    }
    tensors = {
        f"{case}.{name}": tensor.contiguous()
        for case, written in cases.items()
        for name, tensor in written.items()
    }
    save_file(tensors, Path(__file__).parent / "formats.safetensors")


if __name__ == "__main__":
    main()
