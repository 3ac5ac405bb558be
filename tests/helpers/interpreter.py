"""Triton's interpreter without the work that it repeats, so that tests of kernels take less time.

The interpreter runs a kernel as Python. At each launch, and at each call of a device function, it searches all of
`triton.language` for the functions that it replaces; each operation builds and checks the types of its blocks anew,
and each sum of integers is computed a second time, to look for an overflow that is not reported. Here the
replacements are searched for once, a device function finds them in place, block types of one shape share their parts,
operands of equal types need no conversion, and a number beside tensors of one type is made a block once. The operations
themselves are the interpreter's own.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy


def _numpy_sums_rows_alike() -> bool:
    generator = numpy.random.default_rng(0)
    for size in (16, 32, 64):
        a, b = generator.standard_normal((2, size, size), dtype=numpy.float32)
        if not numpy.array_equal(numpy.roll(a @ b, 1, 0), numpy.roll(a, 1, 0) @ b):
            return False
    return True


NUMPY_SUMS_ROWS_ALIKE = _numpy_sums_rows_alike()
"""Whether a row of `tl.dot`, numpy's product in the interpreter, has the same bits wherever it stands in a tile. It
depends on the kernels that numpy's OpenBLAS chooses for the CPU."""


def quicken() -> None:
    """Replace the functions that repeat themselves, in this process."""
    from triton import language
    from triton.runtime import interpreter

    core, builder = language.core, interpreter.interpreter_builder
    if not builder.options.debug:  # else the overflow would be an error
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = Patches(interpreter, language)
    interpreter._get_np_dtype = by_name(interpreter._get_np_dtype)
    core.block_type.__init__ = sharing_parts(core.block_type.__init__, core._unwrap_if_constexpr)
    core.tensor.__init__ = of_its_type(core)
    core.dtype.__eq__ = same_or(core.dtype.__eq__)
    core._unwrap_if_constexpr = unwrapping(core, core._unwrap_if_constexpr)
    handle, semantic = interpreter.TensorHandle, type(interpreter.interpreter_semantic)
    handle.__post_init__ = unless_narrow(handle.__post_init__)
    semantic.computation_type_impl = by_names(semantic.computation_type_impl)
    semantic.broadcast_impl_value = unless_alike(core, by_shapes(core, semantic.broadcast_impl_value))
    convert = keeping_numbers(core, handle, semantic.binary_op_type_checking_impl)
    semantic.binary_op_type_checking_impl = unless_alike(core, convert, of_one_dtype=True)


class Patches:
    """`_patch_lang` of the interpreter, and the scope that it returns: what a launch replaces, and restores at its end.

    A device function, which Triton patches for again, finds everything replaced.

    Args:
        interpreter: `triton.runtime.interpreter`.
        language: `triton.language`.
    """

    def __init__(self, interpreter: Any, language: Any) -> None:
        self._patch, self._missing = interpreter._patch_lang, interpreter._MISSING
        self._semantic = interpreter.interpreter_semantic
        self._sees_all = SimpleNamespace(__globals__={"tl": language, "core": language.core})
        self._changes: list[tuple[Any, str, Any, Any]] = []  # owner, name, what it was, what it is in a launch
        self._active = False

    def __call__(self, function: Any) -> "Patches":
        if not self._active:
            self._active = True
            if not self._changes:
                self._search()
            for owner, name, _, replacement in self._changes:
                setattr(owner, name, replacement)
        return self

    def _search(self) -> None:
        originals: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for owner, name, original in self._patch(self._sees_all)._changes:
            originals.setdefault((id(owner), name), (owner, name, original))  # the first of several patches
        self._changes = [(*change, self._shorter(*change[1:], getattr(*change[:2]))) for change in originals.values()]

    def _shorter(self, name: str, original: Any, replacement: Any) -> Any:
        """The replacement, without calls that only pass arguments on."""
        if name == "to_ir":
            return by_name(replacement)
        function = getattr(original, "__wrapped__", None)
        if function is None or (getattr(replacement, "__kwdefaults__", None) or {}).get("member") is not original:
            return replacement
        semantic = self._semantic

        def call(*args: Any, _semantic: Any = None, **options: Any) -> Any:
            return function(*args, _semantic=semantic, **options)

        return call

    def restore(self) -> None:
        for owner, name, original, _ in self._changes:
            if original is self._missing:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._active = False


def by_name(of_dtype: Callable[..., Any]) -> Callable[..., Any]:
    """`_get_np_dtype` of the interpreter, or `dtype.to_ir`, called once for each type's name."""
    found: dict[str, Any] = {}

    def remembered(dtype: Any, *builder: Any) -> Any:
        name = dtype.name
        if name not in found:
            found[name] = of_dtype(dtype, *builder)
        return found[name]

    return remembered


def by_names(of_dtypes: Callable[..., Any]) -> Callable[..., Any]:
    """`computation_type_impl`, called once for two types' names, which of them is a number's, and whether to divide."""
    found: dict[tuple[Any, ...], Any] = {}

    def remembered(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in found:
            found[key] = of_dtypes(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return found[key]

    return remembered


def unless_narrow(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """`TensorHandle.__post_init__`, which looks for elements that are wider than their type: not called for others."""
    widths: dict[str, int] = {}

    def checked(self: Any) -> None:
        name = self.dtype.name
        if self.data.itemsize > widths.get(name, 0):
            check(self)
            widths[name] = self.data.itemsize

    return checked


def by_shapes(core: Any, broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """`broadcast_impl_value`, which compares the shapes of two blocks: called once for two shapes of one rank."""
    found: dict[tuple[Any, Any], Any] = {}

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block() != other.is_block():
            if one.is_block():
                block = core.block_type(other, one.shape)
                return lhs, self.tensor(self.builder.create_splat(block, rhs.handle), block)
            block = core.block_type(one, other.shape)
            return self.tensor(self.builder.create_splat(block, lhs.handle), block), rhs
        if not one.is_block() or len(one.shape) != len(other.shape):
            return broadcast(self, lhs, rhs)
        shapes = one.shape, other.shape
        if shapes not in found:
            found[shapes] = broadcast(self, lhs, rhs)[0].type.shape
        shape = found[shapes]

        def to_shape(x: Any) -> Any:
            if x.type.shape == shape:
                return x
            return self.tensor(self.builder.create_broadcast(x.handle, shape), core.block_type(x.dtype, shape))

        return to_shape(lhs), to_shape(rhs)

    return broadcasted


def keeping_numbers(core: Any, handle: Any, convert: Callable[..., Any]) -> Callable[..., Any]:
    """`binary_op_type_checking_impl`, which makes a block of a number beside a tensor: called once for each number and
    type of a tensor that stays as it is. The elements of the block are kept, and cannot be written to."""
    found: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}

    def converted(self: Any, lhs: Any, rhs: Any, *options: bool) -> Any:
        first = type(lhs) is not core.tensor
        number, x = (lhs, rhs) if first else (rhs, lhs)
        kind = type(number)
        if (kind is not int and kind is not float and kind is not bool) or type(x) is not core.tensor:
            return convert(self, lhs, rhs, *options)
        key = first, kind, number, x.type.name, options
        if key in found:
            data, dtype, block = found[key]
            kept = core.tensor(handle(data, dtype), block)
            return (kept, x) if first else (x, kept)
        results = convert(self, lhs, rhs, *options)
        block, stays = results if first else results[::-1]
        if stays is x and block.handle.data.size <= 2**15:
            if len(found) == 2**12:
                found.clear()
            block.handle.data.flags.writeable = False
            found[key] = block.handle.data, block.handle.dtype, block.type
        return results

    return converted


def sharing_parts(initialize: Callable[..., None], unwrap: Callable[[Any], Any]) -> Callable[..., None]:
    """`block_type.__init__`, called once for each shape and name of an element type; equal shapes are one object."""
    found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def shared(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size if type(size) is int else unwrap(size) for size in shape])
        key = element_ty.name, sizes
        if key in found and all(type(size) is int for size in sizes):  # 4.0 equals 4
            self.element_ty = element_ty
            self.shape, self.numel, self.name = found[key]
        else:
            initialize(self, element_ty, shape)
            if all(type(size) is int for size in sizes):
                self.shape = shapes.setdefault(sizes, self.shape)
                found[key] = self.shape, self.numel, self.name

    return shared


def of_its_type(core: Any) -> Callable[..., None]:
    """`tensor.__init__`; tensors of one shape share it."""
    found: dict[int, tuple[Any, Any, Any]] = {}  # the shape of a type, which it keeps alive, by its id

    def initialize(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else None
        if id(shape) not in found:
            sizes, numel = list(shape or ()), 1
            for size in sizes:
                numel *= size
            found[id(shape)] = shape, core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(numel)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, self.shape, self.numel = found[id(shape)]

    return initialize


def same_or(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """`equal`, not asked whether a type equals itself."""
    return lambda self, other: self is other or equal(self, other)


def unwrapping(core: Any, unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`unwrap`, not asked about values that wrap nothing."""
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype}

    def unwrapped(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    return unwrapped


def unless_alike(core: Any, convert: Callable[..., Any], *, of_one_dtype: bool = False) -> Callable[..., Any]:
    """`convert`, a conversion of two operands to one shape and, with `of_one_dtype`, one dtype: not asked about tensors
    that have these already.

    The last of its four options tells of division, which computes float16 and bfloat16 in float32.
    """
    halves = core.float16, core.bfloat16

    def converted(self: Any, lhs: Any, rhs: Any, *options: bool) -> Any:
        if type(lhs) is core.tensor and type(rhs) is core.tensor:
            one, other = lhs.type, rhs.type
            alike = one.shape is other.shape if one.is_block() and other.is_block() else one is other
            if of_one_dtype:
                dtype = lhs.dtype
                alike = alike and dtype is rhs.dtype and not dtype.is_ptr()
                alike = alike and not (len(options) == 4 and dtype in halves)
            if alike:
                return lhs, rhs
        return convert(self, lhs, rhs, *options)

    return converted
