"""Write golden.npz: what codecs and selections must give, from the formulas of the papers.

    python tests/codecs/golden.py

Everything is computed in float64 and in Python's integers, without commhooks: the file is made
once, by hand, and test_golden.py holds each implementation to it. Codecs compute in float32, so a
number close to where two codes meet may get either of them: ``sure`` marks the others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PATH = Path(__file__).with_name("golden.npz")
SEED = 2**63 + 12345
SHORTER = 37
"""Numbers that the second part has less than the first one."""

Array = NDArray[np.float64]


def random_bits(index: int, seed: int = SEED) -> int:
    """32 bits: a hash with the constants of MurmurHash3's finalizer, keyed twice."""
    low, high, word = seed % 2**32, seed >> 32, 2**32
    bits = (index * 0x9E3779B1 + low) % word
    bits = ((bits ^ bits >> 16) * 0x85EBCA6B) % word ^ high
    bits = ((bits ^ bits >> 13) * 0xC2B2AE35) % word
    return bits ^ bits >> 16


def uniform(index: Array) -> Array:
    return np.array([random_bits(int(i)) >> 8 for i in index.ravel()]).reshape(index.shape) / 2**24


def mantissa(index: Array) -> Array:
    bits = np.array([random_bits(int(i)) & 0x7FFFFF for i in index.ravel()])
    return bits.reshape(index.shape) / 2**23


def coin(index: Array) -> Array:
    coins = [(int(i) * 0x9E3779B1 + SEED) % 2**32 >> 31 for i in index.ravel()]
    return np.array(coins).reshape(index.shape)


@dataclass
class Codec:
    """One codec: ``scale(y)`` of the numbers of a block, and codes of numbers in units of it.

    ``magnitudes`` are the numbers above zero that it can represent, for blocks that have each of
    them and each tie. ``group`` and the functions for groups as in commhooks/codecs.
    """

    bits: int
    block: int
    scale: Callable[[Array], float]
    code: Callable[[Array, Array], Array]
    value: Callable[[Array], Array]
    magnitudes: Array
    group: int = 0
    group_code: Callable[[float], int] = lambda _: 0
    group_scale: Callable[[int], float] = lambda _: 1.0
    is_vote: bool = False


def largest(y: Array) -> float:
    return float(np.abs(y).max())


def root_mean(y: Array) -> float:
    return math.sqrt(float((y**2).mean()))


def level_codec(
    bits: int, levels: int, norm: str = "max", clip: float = math.inf, stochastic: bool = False
) -> Codec:
    """Integers; QSGD (Alistarh et al. 2017, section 3.1) and TernGrad (Wen et al. 2017)."""
    lowest = -levels - (norm == "signed_max")

    def scale(y: Array) -> float:
        if norm == "signed_max":
            return largest(y) / (lowest if y.max() == largest(y) else -lowest)
        if norm == "l2":
            return math.sqrt(float((y**2).sum())) / levels
        return min(largest(y), clip * root_mean(y)) / levels

    def code(ratio: Array, index: Array) -> Array:
        wanted = ratio.clip(lowest, levels)
        if stochastic:
            below = np.floor(wanted)
            level = below + (uniform(index) < wanted - below)
        else:
            level = np.round(wanted)  # ties to even
        return level.astype(np.int64) % 2**bits

    def value(codes: Array) -> Array:
        return np.where(codes < 2 ** (bits - 1), codes, codes - 2.0**bits)

    magnitudes = np.arange(1.0, -lowest + 1)
    return Codec(bits, 512 if bits == 8 else 64, scale, code, value, magnitudes)


def float_magnitudes(exponents: int, mantissas: int, bias: int, top: float) -> Array:
    """All numbers of a format from zero on, in the order of their codes."""
    numbers = [
        m / 2**mantissas * 2.0 ** (1 - bias)
        if e == 0
        else (1 + m / 2**mantissas) * 2.0 ** (e - bias)
        for e in range(2**exponents)
        for m in range(2**mantissas)
    ]
    return np.array([number for number in numbers if number <= top])


E2M1 = float_magnitudes(2, 1, 1, 6)
E4M3 = float_magnitudes(4, 3, 7, 448)
E5M2 = float_magnitudes(5, 2, 15, 57344)
E3M0 = float_magnitudes(3, 0, 3, 16)


def nearest(numbers: Array, magnitudes: Array) -> Array:
    """The positions of the nearest magnitudes; of two, the even one."""
    sizes = np.abs(numbers).clip(0, magnitudes[-1])
    above = np.searchsorted(magnitudes, sizes).clip(1)
    from_below = sizes - magnitudes[above - 1]
    to_above = magnitudes[above] - sizes
    is_up = (to_above < from_below) | ((to_above == from_below) & (above % 2 == 0))
    return above - 1 + is_up


def float_codec(bits: int, block: int, magnitudes: Array) -> Codec:
    """Micikevicius et al. 2022 (e4m3, e5m2), and e3m0 as in Streaming DiLoCo."""
    sign = 2 ** (bits - 1)
    return Codec(
        bits,
        block,
        lambda y: largest(y) / magnitudes[-1],
        lambda ratio, _: nearest(ratio, magnitudes) + sign * np.signbit(ratio),
        lambda codes: np.where(codes >= sign, -1, 1) * magnitudes[codes % sign],
        magnitudes[1:],
    )


def grouped(group: int, scale: Callable[[Array], float], group_code, group_scale) -> Codec:  # type: ignore[no-untyped-def]
    plain = float_codec(4, 128, E2M1)
    return Codec(4, 128, scale, plain.code, plain.value, E2M1[1:], group, group_code, group_scale)


def natural_code(ratio: Array, index: Array) -> Array:
    """Horvath et al. 2022, definition 1, with 127 powers of two."""
    size = np.abs(ratio)
    exponent = np.floor(np.log2(np.maximum(size, 2.0**-126)))
    above = np.where(size < 2.0**-126, size / 2.0**-126, size / 2.0**exponent - 1)
    low = np.where(size < 2.0**-126, 0, exponent + 127)
    # Up with the probability `above`. Down if it is 0, whatever the random number is.
    return (low + (mantissa(index) + above >= 1) + 128 * np.signbit(ratio)).astype(np.int64)


def natural_value(codes: Array) -> Array:
    exponent = codes % 128
    return np.where(codes >= 128, -1, 1) * np.where(exponent == 0, 0, 2.0 ** (exponent - 127.0))


def sign_codec(scale: Callable[[Array], float], is_vote: bool = False) -> Codec:
    """Karimireddy et al. 2019 (mean), Tang et al. 2021 (root mean), Bernstein et al. 2018."""
    return Codec(
        1,
        64,
        scale,
        lambda ratio, index: np.where(ratio == 0, coin(index), ratio < 0).astype(np.int64),
        lambda codes: 1.0 - 2.0 * codes,
        np.ones(1),
        is_vote=is_vote,
    )


CODECS = {
    "int8": level_codec(8, 127),
    "int8 stochastic": level_codec(8, 127, stochastic=True),
    "int4": level_codec(4, 7),
    "int4 stochastic": level_codec(4, 7, stochastic=True),
    "int2": level_codec(2, 1, "signed_max"),
    "qsgd max": level_codec(4, 5, stochastic=True),
    "qsgd l2": level_codec(8, 100, "l2", stochastic=True),
    "terngrad": level_codec(2, 1, clip=2.5, stochastic=True),
    "e4m3": float_codec(8, 512, E4M3),
    "e5m2": float_codec(8, 512, E5M2),
    "e3m0": float_codec(4, 64, E3M0),
    # OCP Microscaling Formats 1.0, section 6.3; biased by 127.
    "mxfp4": grouped(
        32,
        lambda _: 1.0,
        lambda top: max(math.floor(math.log2(max(top, 2.0**-126))) - 2 + 127, 1),
        lambda code: 2.0 ** (code - 127),
    ),
    "nvfp4": grouped(
        16,
        lambda y: largest(y) / (6 * 448),
        lambda top: int(nearest(np.array([top / 6]), E4M3)[0]),
        lambda code: float(E4M3[code]),
    ),
    "natural": Codec(
        8, 64, lambda y: 2.0 ** math.ceil(math.log2(largest(y))), natural_code, natural_value,
        2.0 ** np.arange(-20, 1),
    ),
    "sign mean": sign_codec(lambda y: float(np.abs(y).mean())),
    "sign root mean": sign_codec(root_mean),
    "sign majority": sign_codec(lambda y: float(np.abs(y).mean()), is_vote=True),
}  # fmt: skip


def given_numbers(codec: Codec, rng: np.random.Generator) -> tuple[Array, Array]:
    """Numbers of two parts, and of each whether scales and ratios are exact in float32."""
    middles = np.concatenate([[0], codec.magnitudes])
    exact = np.concatenate([codec.magnitudes[::-1], (middles[1:] + middles[:-1]) / 2])
    exact = np.stack([exact, -exact], axis=1).ravel()
    if codec.group == 16:  # a group with the largest scale makes the scale of the block 1
        groups = [448.0, 1.0, 0.25, 64.0]
        exact = np.concatenate(
            [np.resize(exact, 32)[i % 2 :: 2][:16] * g for i, g in enumerate(groups)]
        )
    exact = exact.astype(np.float32)[: codec.block]
    exact = np.pad(exact, (0, codec.block - exact.size))
    shape = codec.block
    usual = rng.standard_normal(shape)
    wide = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 3, shape)
    sparse = np.where(rng.random(shape) < 0.7, np.where(rng.random(shape) < 0.5, 0.0, -0.0), usual)
    tiny = rng.standard_normal(shape) * 2.0**-110
    broken = np.where(np.arange(shape) == 5, np.nan, usual)
    parts = [
        exact * 2.0**-7,
        usual,
        wide,
        sparse,
        tiny,
        broken,
        np.zeros(shape),
        usual[: shape // 2],
    ]
    first = np.concatenate(parts)
    second = rng.standard_normal(first.size - SHORTER)
    is_exact = np.zeros(first.size + second.size, bool)
    is_exact[: exact.size] = True
    if codec.group == 16:
        is_exact[:16] = False
    return np.concatenate([first, second]).astype(np.float32), is_exact


def encode(codec: Codec, y: Array, exact: Array, first: int) -> dict[str, list[Array]]:
    """What is known of the blocks of one part, whose first number has the index ``first``."""
    found: dict[str, list[Array]] = {
        k: [] for k in ("scales", "groups", "codes", "sure", "decoded")
    }
    for start in range(0, y.size, codec.block):
        numbers, is_exact = y[start : start + codec.block], exact[start : start + codec.block]
        index = first + start + np.arange(numbers.size)
        codes, decoded = np.zeros(numbers.size, np.int64), np.zeros(numbers.size)
        sure = np.ones(numbers.size, bool)
        scale, groups = (
            0.0,
            np.zeros(-(-numbers.size // codec.group) if codec.group else 0, np.int64),
        )
        if not np.isfinite(numbers).all() or largest(numbers) > 2.0**126:
            scale, decoded = np.nan, np.full(numbers.size, np.nan)
        elif largest(numbers) >= 2.0**-100:
            scale = codec.scale(numbers)
            units = np.full(numbers.size, scale)
            for g in range(groups.size):
                members = slice(g * codec.group, (g + 1) * codec.group)
                groups[g] = codec.group_code(largest(numbers[members]) / scale)
                units[members] *= codec.group_scale(int(groups[g]))
            divisors = np.where(units == 0, scale, units)
            codes = codec.code(numbers / divisors, index)
            near = [codec.code(numbers / divisors * (1 + e), index) for e in (-(2**-19), 2**-19)]
            sure = is_exact | ((near[0] == codes) & (near[1] == codes))
            decoded = codec.value(codes) * units
        for name, array in zip(found, ([scale], groups, codes, sure, decoded), strict=True):
            found[name].append(np.asarray(array))
    return found


def of_codec(name: str, codec: Codec, rng: np.random.Generator) -> dict[str, Array]:
    y, exact = given_numbers(codec, rng)
    half = (y.size + SHORTER) // 2
    found = encode(codec, y[:half].astype(np.float64), exact[:half], 0)
    others = encode(codec, y[half:].astype(np.float64), exact[half:], half)
    result = {key: np.concatenate([*found[key], *others[key]]) for key in found}
    result |= {
        "y": y,
        "codes": result["codes"].astype(np.uint8),
        "groups": result["groups"].astype(np.uint8),
    }
    result["decoded"] = result["decoded"].astype(np.float32)
    settings = np.array([codec.bits, codec.block, codec.group, codec.is_vote])
    return {f"{name}/{key}": array for key, array in (result | {"settings": settings}).items()}


def rotated(y: Array) -> Array:
    """Croci et al. 2024: signs, then Hadamard matrices over roots of their sizes."""
    result, start = y.copy(), 0
    for i in range(y.size):
        bits = i * 0x9E3779B1 % 2**32
        bits = (bits ^ bits >> 15) * 0x85EBCA77 % 2**32
        result[i] *= 1 - 2 * (bits >> 31)
    while start < y.size:
        size = min(128, 2 ** int(math.log2(y.size - start)))
        matrix = np.array([[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)])
        result[start : start + size] = matrix @ result[start : start + size] / math.sqrt(size)
        start += size
    return result


def selected(y: Array, count: int) -> list[int]:
    """The largest magnitudes; of equal ones the first; infinity and NaN before all numbers."""
    sizes = np.where(np.isnan(y), np.inf, np.abs(y)).tolist()
    return sorted(sorted(range(len(y)), key=lambda i: (not math.isnan(y[i]), -sizes[i], i))[:count])


def packed(indices: list[int], numel: int, low: int, adds_rank: bool) -> NDArray[np.uint8]:
    """Elias 1974 and Fano 1971: a bitmap of the high bits, then the low bits; or a plain bitmap."""
    length = ((numel - 1) >> low) + len(indices) if adds_rank else numel
    bitmap = sum(1 << ((index >> low) + adds_rank * rank) for rank, index in enumerate(indices))
    fields = sum((index % 2**low) << low * rank for rank, index in enumerate(indices))
    words = [-(-length // 64), -(-low * len(indices) // 64)]
    both = bitmap.to_bytes(8 * words[0], "little") + fields.to_bytes(8 * words[1], "little")
    return np.frombuffer(both, np.uint8)


def drawn(seed: int, rotation: int, numel: int, count: int) -> list[int]:
    """One index of each run of the circle of all indices, which starts at ``rotation``."""
    found = []
    for run in range(count):
        begin, end = run * numel // count, (run + 1) * numel // count
        offset = random_bits(run, seed) * (end - begin) >> 32
        found.append((begin + offset + rotation) % numel)
    return sorted(found)


def of_indices(rng: np.random.Generator) -> dict[str, Array]:
    y = rng.standard_normal(3000).round(1).astype(np.float32)  # with many equal magnitudes
    y[[100, 2000]], y[1500] = (np.inf, -np.inf), np.nan
    result = {"selection/y": y}
    for count in (1, 3, 40, 1000):
        result[f"selection/largest {count}"] = np.array(selected(y, count), np.int32)
    chunks = [
        start + np.array(selected(y[start : start + 128], 5)) for start in range(0, 3000, 128)
    ]
    result["selection/chunks 128 5"] = np.concatenate(chunks).astype(np.int32)
    result["selection/above 1.5"] = np.flatnonzero(~(np.abs(y) < 1.5)).astype(np.int32)
    for numel, count, low, adds_rank in (
        (3000, 40, 6, True),
        (3000, 1000, 0, False),
        (500, 60, 3, True),
    ):
        indices = sorted(rng.choice(numel, count, replace=False).tolist())
        name = f"packed/{numel} {count} {low} {int(adds_rank)}"
        result[name] = packed(indices, numel, low, adds_rank)
        result[f"{name} indices"] = np.array(indices, np.int32)
    for numel, count, rotation in (
        (3000, 40, 0),
        (3000, 700, 1234),
        (17, 17, 5),
        (2**31 - 1, 9, 2**30),
    ):
        found = np.array(drawn(SEED - 2**63, rotation, numel, count), np.int32)
        result[f"drawn/{numel} {count} {rotation}"] = found
    return result


def main() -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Array] = {}
    for name, codec in CODECS.items():
        arrays |= of_codec(name, codec, rng)
    y = rng.standard_normal(3 * 128 + 64 + 8 + 1)
    arrays |= {"rotation/y": y, "rotation/rotated": rotated(y)} | of_indices(rng)
    np.savez_compressed(PATH, **arrays)
    print(f"{PATH}: {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
