"""Every Triton kernel: right on awkward sizes, and how close to the roof on serving sizes.

Knows cases only. A row is `error` in units of its tolerance, and time beside torch's operators.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from treadle.kernels import gpu
from treadle.perf.gpu.roofline import peaks, time_s
from treadle.perf.gpu.sections import Failed, Setting, Unit, Unmeasured, Values

_TORCH_S = 0.05  # for timing what serves as a yardstick only


def units(setting: Setting) -> Sequence[Unit]:
    if not gpu.HAS_TRITON:
        return [Unit("triton", partial(_refuse, "Triton is not installed"))]
    if setting.device == "cpu" and not _is_interpreted():
        return [Unit("triton", partial(_refuse, "compiled kernels need a GPU"))]
    from treadle.perf.gpu.attention_cases import attention_cases
    from treadle.perf.gpu.kernel_cases import Case, rowwise_cases
    from treadle.perf.gpu.sampling_cases import sampling_cases

    cases: list[Case] = [
        *rowwise_cases(setting), *attention_cases(setting), *sampling_cases(setting)
    ]  # fmt: skip

    def measure(case: Case) -> Values:
        error = case.error()
        values: Values = {"error": error}
        if not error <= 1:  # NaN is no pass
            raise Failed("wrong on a small input", values)
        timed = case.timed()
        seconds = time_s(timed.call, setting.device)
        values["us"] = 1e6 * seconds
        roof = peaks(setting.device)
        if timed.num_bytes:
            values["gb_s"] = timed.num_bytes / seconds / 1e9
            values["of_bandwidth"] = timed.num_bytes / seconds / roof.bytes_per_s
        if timed.flops:
            values["tflops"] = timed.flops / seconds / 1e12
            values["of_peak"] = timed.flops / seconds / roof.bf16_flops
        if timed.rival is not None:
            values["torch_us"] = 1e6 * time_s(timed.rival, setting.device, _TORCH_S)
            values["large_error"] = error = timed.error()
            if not error <= 1:
                raise Failed("differs from torch on a large input", values)
        return values

    return [Unit(case.name, partial(measure, case)) for case in cases]


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _refuse(reason: str) -> Values:
    raise Unmeasured(reason)
