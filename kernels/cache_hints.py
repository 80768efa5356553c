"""What compiled code says of memory: what it will read soon, and what it writes that nobody will read soon.

What is read soon need not be waited for then. What is only written and not read soon goes to memory past the cache: a
processor otherwise reads each line before it is written to, a third of all traffic where as much is read as written.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

CACHE_LINE_BYTES = 64
Number = TypeVar("Number", bound=np.generic)
READ, OFTEN, DATA = 0, 3, 1  # what LLVM calls rw, locality and cache type
FLOAT_BYTES = 4
VECTOR_FLOATS = CACHE_LINE_BYTES // FLOAT_BYTES


def zeros_on_lines(count: int, dtype: type[Number]) -> NDArray[Number]:
    """As `np.zeros`, beginning where a line of the cache does: no wide load or store is of two lines."""
    num_bytes = count * np.dtype(dtype).itemsize
    held = np.zeros(num_bytes + CACHE_LINE_BYTES, np.uint8)
    start = -held.ctypes.data % CACHE_LINE_BYTES
    return held[start : start + num_bytes].view(dtype)


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


def _stream_code(typing_context: Any, source: Any, target: Any) -> tuple[Any, Callable[..., Any]] | None:
    """Stores that LLVM calls nontemporal, of whole cache lines; the rest of the first and of the last as usual."""
    if not all(array.layout == "C" and array.ndim == 1 and array.dtype == types.float32 for array in (source, target)):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        read, written = (
            context.make_array(kind)(context, builder, array)
            for kind, array in zip((source, target), arguments, strict=True)
        )
        count = cgutils.unpack_tuple(builder, read.shape)[0]
        vector = ir.VectorType(ir.FloatType(), VECTOR_FLOATS)

        def number(value: int) -> Any:
            return ir.Constant(count.type, value)

        def copy_each(start: Any, stop: Any) -> None:
            with cgutils.for_range_slice(builder, start, stop, number(1)) as (at, _):
                builder.store(builder.load(builder.gep(read.data, [at])), builder.gep(written.data, [at]))

        past_line = builder.and_(builder.ptrtoint(written.data, count.type), number(CACHE_LINE_BYTES - 1))
        to_line = builder.lshr(builder.and_(builder.sub(number(0), past_line), number(CACHE_LINE_BYTES - 1)), number(2))
        first = builder.select(builder.icmp_signed("<", to_line, count), to_line, count)
        lines = builder.and_(builder.sub(count, first), number(-VECTOR_FLOATS))
        last = builder.add(first, lines)
        copy_each(number(0), first)
        with cgutils.for_range_slice(builder, first, last, number(VECTOR_FLOATS)) as (at, _):
            come = builder.bitcast(builder.gep(read.data, [at]), vector.as_pointer())
            gone = builder.bitcast(builder.gep(written.data, [at]), vector.as_pointer())
            store = builder.store(builder.load(come, align=FLOAT_BYTES), gone, align=CACHE_LINE_BYTES)
            store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        copy_each(last, count)
        return context.get_dummy_value()

    return types.void(source, target), generate


def _streamed_code(typing_context: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


stream = cast("Callable[[NDArray[np.float32], NDArray[np.float32]], None]", intrinsic(_stream_code))
"""stream(source, target): target[:] = source, of fp32 in one row, past the cache. Both are of one length, unchecked."""

streamed = cast("Callable[[], None]", intrinsic(_streamed_code))
"""streamed(): what was streamed before is there before whatever this thread writes after. Owed by whoever streams."""
