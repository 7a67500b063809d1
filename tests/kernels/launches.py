"""Records what the Triton backend would launch, and compiles it for GPUs that are not there."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int32": "i32",
    "uint8": "u8",
    "uint32": "u32",
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel with the types of its arguments and all that it is compiled with."""

    kernel: Any
    types: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        module = self.kernel.fn.__module__.rpartition(".")[2]
        return module + self.kernel.fn.__name__.replace("_kernel", "")

    def compile(self, target: tuple[str, int | str, int]) -> Any:
        constants = dict(self.constants)
        names = [name for name in self.kernel.arg_names if name not in constants]
        assert len(names) == len(self.types), (self.name, names, self.types)
        types = dict(zip(names, self.types, strict=True))
        source = ASTSource(
            fn=self.kernel,
            signature={name: types.get(name, "constexpr") for name in self.kernel.arg_names},
            constexprs=constants,
            attrs={
                (i,): [["tt.divisibility", 16]]
                for i, name in enumerate(self.kernel.arg_names)
                if types.get(name, "").startswith("*")
            },
        )
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return triton.compile(source, target=GPUTarget(*target), options=options)


class Recorder:
    """Stands in for `triton_kernels._launch.launch`: notes what is asked for, returns zeros."""

    def __init__(self) -> None:
        self.launches: dict[Launch, None] = {}

    def __call__(
        self,
        kernel,
        *arrays,
        out,
        grid,
        num_warps,
        num_stages=1,
        aliases=None,
        tiles=None,
        written=None,
        zeroed=(),
        scalars=(),
        **constants,
    ):
        assert grid >= 1
        described = dict(tiles or {})
        types = [TYPES[array.dtype.name] for array in arrays]
        for i, tile in (written or {}).items():
            described[len(types)] = tile
            types.append(TYPES[jnp.dtype(out[i].dtype).name])
        pointers = len(types)
        taken = {*(aliases or {}).values(), *(written or {})}
        types += [TYPES[jnp.dtype(o.dtype).name] for i, o in enumerate(out) if i not in taken]
        arguments = [
            f"tensordesc<{kind}[{described[i][0]}, {described[i][1]}]>"
            if i in described
            else f"*{kind}"
            for i, kind in enumerate(types)
        ]
        names = kernel.arg_names[pointers:]
        ones = {name: 1 for name, scalar in zip(names, scalars, strict=False) if scalar == 1}
        arguments[pointers:pointers] = ["i32"] * (len(scalars) - len(ones))
        constants, arguments = ones | constants, tuple(arguments)
        launch = Launch(kernel, arguments, tuple(constants.items()), num_warps, num_stages)
        self.launches[launch] = None
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out)

    def record(self, function, *shapes: jax.ShapeDtypeStruct) -> list[Launch]:
        """Returns what `function` launches, in order, each kind once."""
        self.launches.clear()
        jax.eval_shape(function, *shapes)
        return list(self.launches)
