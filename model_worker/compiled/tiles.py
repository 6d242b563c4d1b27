"""The innermost loops, in vector instructions: tiles of dot products and of weighted sums.

A compiler that vectorizes a loop over several sums by itself runs out of registers and spills, at
half the speed; here the sums of a tile are the registers. What is summed in which order depends on
neither the tile nor its neighbours, so a row's result is the same to the bit whatever is computed
beside it. Written as LLVM vectors of eight lanes, without an instruction of a kind of CPU: LLVM
finds the fused and the pairwise multiply-add where there is one.

Operands are float32 or, beside float32, int8; or int16 and int8, whose products are summed in int32
within each lane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from model_worker.row_codes import NUMBERS_AT_ONCE

COLUMNS = 3  # of a tile: with four rows of them, all sixteen vector registers are in use
ROW_COLUMNS = 8  # of a tile of one row: as many sums as hide a multiply-add's latency
FLOAT_ROWS, INTEGER_ROWS = 4, 3  # of a tile: the products of integers need a register more
STREAM_COLUMNS = 2  # of one row over weights from memory, which come fastest in their order
FLOAT_STEP = 8  # numbers that one step of a dot product takes
INTEGER_STEP = NUMBERS_AT_ONCE

_cgutils: Any = cgutils  # numba brings no types
_types: Any = types

_LANES = 8
_BYTE, _SHORT, _INT, _LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, _LANES)
_INTS = ir.VectorType(_INT, _LANES)


def rows_of_tile(operand: Any) -> int:
    """Rows of a ``dots`` tile where one side is ``operand``, float32 or int16."""
    raise NotImplementedError("for compiled code")


def step_of(operand: Any) -> int:
    """How many numbers of a row of ``operand`` one step of a dot product takes."""
    raise NotImplementedError("for compiled code")


@overload(rows_of_tile, strict=False)
def _rows_of_tile(operand: Any) -> Callable[[Any], int]:
    if operand.dtype == types.float32:
        return lambda operand: FLOAT_ROWS
    return lambda operand: INTEGER_ROWS


@overload(step_of, strict=False)
def _step_of(operand: Any) -> Callable[[Any], int]:
    if operand.dtype == types.float32:
        return lambda operand: FLOAT_STEP
    return lambda operand: INTEGER_STEP


def _dots(rows: int | None, columns: int, *, is_ahead: bool = False) -> Any:
    """The intrinsic ``(x, weight, m, n, depth)``: the dot products over the first ``depth`` (a
    multiple of the step) numbers of ``rows`` rows of ``x`` (any, k) from m on with ``columns`` rows
    of ``weight`` (any, k) from n on, row by row, as float32. ``rows`` None is ``rows_of_tile``.
    ``is_ahead``: ask for the weights after next meanwhile, for memory is slower than the sums.
    """

    def tile(typing_context: Any, x: Any, weight: Any, m: Any, n: Any, depth: Any) -> Any:
        is_float = types.float32 in (x.dtype, weight.dtype)
        num_rows = rows or (FLOAT_ROWS if is_float else INTEGER_ROWS)
        returned = _types.UniTuple(types.float32, num_rows * columns)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            m, n, depth = args[2:]
            x_rows = _row_pointers(context, builder, signature.args[0], args[0], m, num_rows)
            w_rows = _row_pointers(context, builder, signature.args[1], args[1], n, columns)
            step = FLOAT_STEP if is_float else INTEGER_STEP
            zero = (
                ir.Constant(_FLOATS, [0.0] * _LANES)
                if is_float
                else ir.Constant(_INTS, [0] * _LANES)
            )
            with _Loop(builder, depth, step, [zero] * (num_rows * columns)) as loop:
                weights = [_operand(builder, row, loop.index, is_float) for row in w_rows]
                if is_ahead:
                    _prefetch(builder, w_rows, loop.index, depth, 2 * columns)
                sums: list[Any] = []
                for row in x_rows:
                    own = _operand(builder, row, loop.index, is_float)
                    for column in weights:
                        total = loop.sums[len(sums)]
                        sums.append(_multiply_add(builder, own, column, total, is_float))
                loop.close(sums)
            totals = loop.sums if is_float else [builder.sitofp(s, _FLOATS) for s in loop.sums]
            groups = [totals[i : i + columns] for i in range(0, len(totals), columns)]
            flat = [total for group in groups for total in _all_lane_sums(builder, group)]
            return context.make_tuple(builder, returned, flat)

        return returned(x, weight, types.intp, types.intp, types.intp), generate

    return intrinsic(tile)


dots = _dots(None, COLUMNS)
dots_ahead = _dots(None, COLUMNS, is_ahead=True)
dots_of_row = _dots(1, ROW_COLUMNS)
dots_of_stream = _dots(1, STREAM_COLUMNS, is_ahead=True)
dot = _dots(1, 1)


def _weighted_sums(rows: int, vectors: int) -> Any:
    """The intrinsic ``(weights, values, m, d, out)``: to ``rows`` rows of ``out`` (any, width) from
    m on, ``vectors`` times eight columns of it from d on, add the sums over t of weights[row, t]
    (float32) * values[t, column] (float32 or int8)."""

    def tile(typing_context: Any, weights: Any, values: Any, m: Any, d: Any, out: Any) -> Any:
        is_float = values.dtype == types.float32

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            m, d = args[2:4]
            w_rows = _row_pointers(context, builder, signature.args[0], args[0], m, rows)
            outputs = _row_pointers(context, builder, signature.args[4], args[4], m, rows)
            targets = [
                builder.bitcast(
                    builder.gep(output, [builder.add(d, _LONG(vector * _LANES))]),
                    _FLOATS.as_pointer(),
                )
                for output in outputs
                for vector in range(vectors)
            ]
            array = _cgutils.create_struct_proxy(signature.args[1])(context, builder, value=args[1])
            stride = builder.extract_value(array.strides, 0)
            data = builder.bitcast(builder.gep(array.data, [d]), _BYTE.as_pointer())
            count = builder.extract_value(array.shape, 0)
            before = [builder.load(target, align=4) for target in targets]
            with _Loop(builder, count, 1, before) as loop:
                own = [
                    _splat(builder, builder.load(builder.gep(row, [loop.index]))) for row in w_rows
                ]
                row = builder.gep(data, [builder.mul(loop.index, stride)])
                sums = list(loop.sums)
                for vector in range(vectors):
                    value = _floats_at(builder, row, vector * _LANES, is_float)
                    for index, weight in enumerate(own):
                        at = index * vectors + vector
                        sums[at] = _multiply_add(builder, weight, value, sums[at], True)
                loop.close(sums)
            for target, total in zip(targets, loop.sums, strict=True):
                builder.store(total, target, align=4)
            return context.get_dummy_value()

        return types.void(weights, values, types.intp, types.intp, out), generate

    return intrinsic(tile)


WEIGHTED_ROWS, WEIGHTED_COLUMNS = 3, 32
weighted_sums = _weighted_sums(WEIGHTED_ROWS, WEIGHTED_COLUMNS // _LANES)
weighted_sums_of_row = _weighted_sums(1, WEIGHTED_COLUMNS // _LANES)
weighted_sums_narrow = _weighted_sums(1, 1)


class _Loop:
    """``for index in range(0, stop, step)`` with sums carried along; after it they are final."""

    def __init__(self, builder: Any, stop: Any, step: int, sums: list[Any]) -> None:
        """``sums``: what they are before the first turn."""
        self._builder, self._stop, self._step = builder, stop, step
        self.sums = sums

    def __enter__(self) -> _Loop:
        builder = self._builder
        before = builder.block
        self._head = builder.append_basic_block("tile.head")
        body = builder.append_basic_block("tile.body")
        self._after = builder.append_basic_block("tile.after")
        builder.branch(self._head)
        builder.position_at_end(self._head)
        self.index = builder.phi(_LONG)
        self.index.add_incoming(_LONG(0), before)
        phis = [builder.phi(total.type) for total in self.sums]
        for phi, total in zip(phis, self.sums, strict=True):
            phi.add_incoming(total, before)
        self.sums = phis
        builder.cbranch(builder.icmp_signed("<", self.index, self._stop), body, self._after)
        builder.position_at_end(body)
        return self

    def close(self, sums: list[Any]) -> None:
        builder = self._builder
        self.index.add_incoming(builder.add(self.index, _LONG(self._step)), builder.block)
        for phi, total in zip(self.sums, sums, strict=True):
            phi.add_incoming(total, builder.block)
        builder.branch(self._head)

    def __exit__(self, *error: object) -> None:
        self._builder.position_at_end(self._after)


def _row_pointers(context: Any, builder: Any, kind: Any, array: Any, first: Any, n: int) -> Any:
    fields = _cgutils.create_struct_proxy(kind)(context, builder, value=array)
    stride = builder.extract_value(fields.strides, 0)
    data = builder.bitcast(fields.data, _BYTE.as_pointer())
    offsets = [builder.mul(builder.add(first, _LONG(i)), stride) for i in range(n)]
    rows = [builder.gep(data, [offset]) for offset in offsets]
    return [builder.bitcast(row, fields.data.type) for row in rows]


def _operand(builder: Any, row: Any, index: Any, is_float: bool) -> Any:
    """Eight numbers of a row as float32, or sixteen as int16."""
    kind = row.type.pointee
    lanes = ir.VectorType(kind, FLOAT_STEP if is_float else INTEGER_STEP)
    at = builder.bitcast(builder.gep(row, [index]), lanes.as_pointer())
    loaded = builder.load(at, align=4 if kind == _FLOAT else kind.width // 8)
    if is_float:
        return loaded if kind == _FLOAT else _as_floats(builder, loaded)
    shorts = ir.VectorType(_SHORT, INTEGER_STEP)
    return loaded if kind == _SHORT else builder.sext(loaded, shorts)


def _as_floats(builder: Any, numbers: Any) -> Any:
    return builder.sitofp(builder.sext(numbers, _INTS), _FLOATS)


def _floats_at(builder: Any, row: Any, offset: int, is_float: bool) -> Any:
    """Eight numbers of a row given in bytes, as float32."""
    if is_float:
        at = builder.bitcast(builder.gep(row, [_LONG(4 * offset)]), _FLOATS.as_pointer())
        return builder.load(at, align=4)
    kind = ir.VectorType(_BYTE, _LANES)
    at = builder.bitcast(builder.gep(row, [_LONG(offset)]), kind.as_pointer())
    return _as_floats(builder, builder.load(at, align=1))


def _multiply_add(builder: Any, x: Any, y: Any, total: Any, is_float: bool) -> Any:
    if is_float:
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        name = f"llvm.fmuladd.v{_LANES}f32"
        fused = _cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(fused, [x, y, total])
    wide = ir.VectorType(_INT, INTEGER_STEP)
    products = builder.mul(builder.sext(x, wide), builder.sext(y, wide))
    even = _shuffle(builder, products, products, range(0, INTEGER_STEP, 2))
    odd = _shuffle(builder, products, products, range(1, INTEGER_STEP, 2))
    return builder.add(total, builder.add(even, odd))


def _all_lane_sums(builder: Any, vectors: list[Any]) -> list[Any]:
    fours = [vectors[i : i + 4] for i in range(0, len(vectors), 4)]
    return [total for four in fours for total in _lane_sums(builder, four)]


def _lane_sums(builder: Any, vectors: list[Any]) -> list[Any]:
    """The sum of each of up to four vectors, always in the same order: pairs, fours, halves."""
    padded = [*vectors, *[vectors[-1]] * (4 - len(vectors))]
    fours = _pair_sums(builder, _pair_sums(builder, *padded[:2]), _pair_sums(builder, *padded[2:]))
    low = _shuffle(builder, fours, fours, range(4))
    high = _shuffle(builder, fours, fours, range(4, 8))
    totals = builder.fadd(low, high)
    return [builder.extract_element(totals, _INT(i)) for i in range(len(vectors))]


def _pair_sums(builder: Any, x: Any, y: Any) -> Any:
    even = _shuffle(builder, x, y, (0, 2, 8, 10, 4, 6, 12, 14))
    odd = _shuffle(builder, x, y, (1, 3, 9, 11, 5, 7, 13, 15))
    return builder.fadd(even, odd)


def _shuffle(builder: Any, x: Any, y: Any, lanes: Any) -> Any:
    mask = ir.Constant(ir.VectorType(_INT, len(lanes)), list(lanes))
    return builder.shuffle_vector(x, y, mask)


def _splat(builder: Any, value: Any) -> Any:
    single = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, _INT(0))
    return _shuffle(builder, single, single, [0] * _LANES)


def _prefetch(builder: Any, rows: Any, index: Any, depth: Any, distance: int) -> None:
    """Of the rows that lie ``distance`` rows after these; a row is taken to have ``depth``."""
    arguments = [_BYTE.as_pointer(), _INT, _INT, _INT]
    kind = ir.FunctionType(ir.VoidType(), arguments)
    prefetch = _cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    offset = builder.add(index, builder.mul(depth, _LONG(distance)))
    for row in rows:
        at = builder.bitcast(builder.gep(row, [offset]), _BYTE.as_pointer())
        builder.call(prefetch, [at, _INT(0), _INT(3), _INT(1)])
