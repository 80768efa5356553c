"""This is where compiled code asks for memory that it will read soon, so that it need not wait for it then."""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

CACHE_LINE_BYTES = 64
READ, OFTEN, DATA = 0, 3, 1  # what LLVM calls rw, locality and cache type


def _prefetch_code(typing_context: Any, array: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    """The processor's own instruction; where it has none, nothing."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte_pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        held = context.make_array(array)(context, builder, arguments[0])
        is_one = isinstance(index, types.Integer)
        places = [arguments[1]] if is_one else cgutils.unpack_tuple(builder, arguments[1])
        kinds = [index] if is_one else index
        places = [context.cast(builder, place, kind, types.intp) for place, kind in zip(places, kinds, strict=True)]
        address = cgutils.get_item_pointer(context, builder, array, held, places)
        shape = ir.FunctionType(ir.VoidType(), [byte_pointer, number, number, number])
        prefetch = cgutils.get_or_insert_function(builder.module, shape, "llvm.prefetch.p0i8")
        first = builder.bitcast(address, byte_pointer)
        for start in range(0, context.get_abi_sizeof(context.get_data_type(array.dtype)), CACHE_LINE_BYTES):
            line = builder.gep(first, [number(start)])
            builder.call(prefetch, [line, number(READ), number(OFTEN), number(DATA)])
        return context.get_dummy_value()

    return types.void(array, index), generate


prefetch = cast("Callable[[Any, int | tuple[int, ...]], None]", intrinsic(_prefetch_code))
"""prefetch(array, index): the element is on its way into the cache, if it begins where a line does or fits into one.
Nothing waits for it, and nothing is wrong with an index out of bounds."""
