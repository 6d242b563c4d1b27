"""Loops over LLVM vectors of eight floats, from which the innermost kernels are put together.

A compiler that vectorizes a loop over several sums by itself runs out of registers and spills, at
half the speed; here the sums that a loop carries are the registers. Written without an instruction
of a kind of CPU: LLVM finds the fused and the pairwise multiply-add where there is one. Knows no
kernel.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

cg: Any = cgutils  # numba brings no types

LANES = 8
BYTE, SHORT, INT, LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()
FLOATS = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT, LANES)
SHORTS = ir.VectorType(SHORT, 2 * LANES)
ZEROS = ir.Constant(FLOATS, [0.0] * LANES)
INT_ZEROS = ir.Constant(INTS, [0] * LANES)


class SumLoop:
    """``for index in range(0, stop, step)`` with sums carried along; after it they are final."""

    def __init__(self, builder: Any, stop: Any, step: int, sums: list[Any]) -> None:
        """``sums``: what they are before the first turn."""
        self._builder, self._stop, self._step = builder, stop, step
        self.sums = sums

    def __enter__(self) -> SumLoop:
        builder = self._builder
        before = builder.block
        self._head = builder.append_basic_block("sum.head")
        body = builder.append_basic_block("sum.body")
        self._after = builder.append_basic_block("sum.after")
        builder.branch(self._head)
        builder.position_at_end(self._head)
        self.index = builder.phi(LONG)
        self.index.add_incoming(LONG(0), before)
        phis = [builder.phi(total.type) for total in self.sums]
        for phi, total in zip(phis, self.sums, strict=True):
            phi.add_incoming(total, before)
        self.sums = phis
        builder.cbranch(builder.icmp_signed("<", self.index, self._stop), body, self._after)
        builder.position_at_end(body)
        return self

    def close(self, sums: list[Any]) -> None:
        builder = self._builder
        self.index.add_incoming(builder.add(self.index, LONG(self._step)), builder.block)
        for phi, total in zip(self.sums, sums, strict=True):
            phi.add_incoming(total, builder.block)
        builder.branch(self._head)

    def __exit__(self, *error: object) -> None:
        self._builder.position_at_end(self._after)


def row_pointers(context: Any, builder: Any, kind: Any, array: Any, first: Any, n: int) -> Any:
    """Of ``n`` rows from ``first`` on of an array of two or more dimensions."""
    fields = cg.create_struct_proxy(kind)(context, builder, value=array)
    stride = builder.extract_value(fields.strides, 0)
    data = builder.bitcast(fields.data, BYTE.as_pointer())
    offsets = [builder.mul(builder.add(first, LONG(i)), stride) for i in range(n)]
    rows = [builder.gep(data, [offset]) for offset in offsets]
    return [builder.bitcast(row, fields.data.type) for row in rows]


def numbers_from(context: Any, builder: Any, kind: Any, array: Any, first: Any) -> Any:
    """The pointer to number ``first`` of an array of one dimension."""
    fields = cg.create_struct_proxy(kind)(context, builder, value=array)
    return builder.gep(fields.data, [first])


def vector_at(builder: Any, pointer: Any, kind: Any, offset: int = 0) -> Any:
    """The vector of ``kind`` that lies ``offset`` bytes after ``pointer``, wherever that is."""
    at = builder.gep(builder.bitcast(pointer, BYTE.as_pointer()), [LONG(offset)])
    align = 4 if kind.element == FLOAT else kind.element.width // 8
    return builder.load(builder.bitcast(at, kind.as_pointer()), align=align)


def put(builder: Any, pointer: Any, vector: Any, offset: int = 0) -> None:
    """As the floats that lie ``offset`` bytes after ``pointer``."""
    at = builder.gep(builder.bitcast(pointer, BYTE.as_pointer()), [LONG(offset)])
    builder.store(vector, builder.bitcast(at, vector.type.as_pointer()), align=4)


def floats_of(builder: Any, row: Any, index: Any) -> Any:
    """Eight numbers of a row from ``index`` on, float32 or int8, as float32."""
    kind = row.type.pointee
    loaded = vector_at(builder, builder.gep(row, [index]), ir.VectorType(kind, LANES))
    return loaded if kind == FLOAT else builder.sitofp(builder.sext(loaded, INTS), FLOATS)


def multiply_add(builder: Any, x: Any, y: Any, total: Any) -> Any:
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    name = f"llvm.fmuladd.v{LANES}f32"
    fused = cg.get_or_insert_function(builder.module, kind, name)
    return builder.call(fused, [x, y, total])


def exponential(builder: Any, x: Any) -> Any:
    """exp of eight floats; below -87 as if they were -87, above 87 as if they were 87.

    exp(x) = 2^i exp(r), |r| <= ln(2) / 2, by a polynomial of degree 6 (Cephes' expf): relative
    error below 3e-7.
    """
    x = _within(builder, x, 87.0)
    halves = multiply_add(builder, x, all_lanes(_LOG2E), all_lanes(0.5))
    kind = ir.FunctionType(FLOATS, [FLOATS])
    floor = cg.get_or_insert_function(builder.module, kind, f"llvm.floor.v{LANES}f32")
    whole = builder.call(floor, [halves])
    rest = multiply_add(builder, whole, all_lanes(-_LN2_HIGH), x)
    rest = multiply_add(builder, whole, all_lanes(-_LN2_LOW), rest)
    total = all_lanes(_EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        total = multiply_add(builder, total, rest, all_lanes(term))
    square = builder.fmul(rest, rest)
    result = builder.fadd(multiply_add(builder, total, square, rest), all_lanes(1.0))
    shift = ir.Constant(INTS, [23] * LANES)
    power = builder.shl(builder.fptosi(whole, INTS), shift)
    return builder.bitcast(builder.add(builder.bitcast(result, INTS), power), FLOATS)


_LOG2E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.42860682030941723212e-6
_EXP_TERMS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


def all_lanes(value: float) -> Any:
    """Eight times a constant."""
    return ir.Constant(FLOATS, [value] * LANES)


def _within(builder: Any, x: Any, limit: float) -> Any:
    for sign, bound in (("<", -limit), (">", limit)):
        is_beyond = builder.fcmp_ordered(sign, x, all_lanes(bound))
        x = builder.select(is_beyond, all_lanes(bound), x)
    return x


def pairs_multiply_add(builder: Any, x: Any, y: Any, total: Any) -> Any:
    """To each of eight int32, the products of two int16 with two."""
    wide = ir.VectorType(INT, 2 * LANES)
    products = builder.mul(builder.sext(x, wide), builder.sext(y, wide))
    even = shuffle(builder, products, products, range(0, 2 * LANES, 2))
    odd = shuffle(builder, products, products, range(1, 2 * LANES, 2))
    return builder.add(total, builder.add(even, odd))


def lane_sums(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each of up to four vectors, in the lanes of one of four; always in the same order:
    pairs, fours, halves."""
    padded = [*vectors, *[vectors[-1]] * (4 - len(vectors))]
    fours = _pair_sums(builder, _pair_sums(builder, *padded[:2]), _pair_sums(builder, *padded[2:]))
    low = shuffle(builder, fours, fours, range(4))
    high = shuffle(builder, fours, fours, range(4, 8))
    return builder.fadd(low, high)


def _pair_sums(builder: Any, x: Any, y: Any) -> Any:
    even = shuffle(builder, x, y, (0, 2, 8, 10, 4, 6, 12, 14))
    odd = shuffle(builder, x, y, (1, 3, 9, 11, 5, 7, 13, 15))
    return builder.fadd(even, odd)


def shuffle(builder: Any, x: Any, y: Any, lanes: Any) -> Any:
    mask = ir.Constant(ir.VectorType(INT, len(lanes)), list(lanes))
    return builder.shuffle_vector(x, y, mask)


def splat(builder: Any, value: Any) -> Any:
    """Eight times a float or an int32."""
    kind = ir.VectorType(value.type, LANES)
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT(0))
    return shuffle(builder, single, single, [0] * LANES)


def prefetch(builder: Any, pointer: Any) -> None:
    arguments = [BYTE.as_pointer(), INT, INT, INT]
    kind = ir.FunctionType(ir.VoidType(), arguments)
    function = cg.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    at = builder.bitcast(pointer, BYTE.as_pointer())
    builder.call(function, [at, INT(0), INT(3), INT(1)])
