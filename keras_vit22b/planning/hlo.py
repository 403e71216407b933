"""Read the text of a scheduled HLO module.

Only what a schedule needs: each computation's instructions in their order,
with shapes, operands and attributes. HLO's syntax is described at
https://openxla.org/xla/hlo_dumps.
"""

import dataclasses
import functools
import re

import numpy as np

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|branch_computations|called_computations)="
    r"(%[\w.\-]+|\{[^}]*\})"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CHAIN = re.compile(r'chain_id="(\d+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%([\w.\-]+)")
_INDEX = re.compile(r"index=(\d+)")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([\d,]*)\]")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}")
_IOTA = re.compile(
    r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
)
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_BITS = {"pred": 8, "token": 0}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: string, without `%`.
        shape: string. Of the result; a tuple's is in parentheses.
        opcode: string, such as `"fusion"`.
        operands: tuple of names.
        literal: string. What stands in place of operands, such as a
            constant's value.
        attributes: string. The rest of the line.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple
    literal: str
    attributes: str

    @property
    def called(self):
        """list of the names of the computations that it calls."""
        return [
            name
            for group in _CALLED.findall(self.attributes)
            for name in _OPERAND.findall(group)
        ]

    @property
    def op_name(self):
        """string. Path of the JAX operation that it comes from, or `""`."""
        return _first(_OP_NAME, self.attributes, "")

    @property
    def chain(self):
        """string. Shared by the fusions that one transfer runs in, or `None`.

        Channels will not do: those of one `jax.shard_map` are all the same.
        """
        return _first(_CHAIN, self.attributes, None)

    @property
    def cycles(self):
        """int. The compiler's own estimate, `0` where it gives none."""
        return int(_first(_CYCLES, self.attributes, 0))

    @property
    def groups(self):
        """Array `(groups, devices)` of a collective, or `None`.

        A permute's groups are its pairs of source and target.
        """
        return device_groups(self.attributes)


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed HLO module.

    Attributes:
        entry: string. Name of the entry computation.
        computations: dict from name to a list of `Instruction`.
    """

    entry: str
    computations: dict

    def trip_count(self, loop, by_name):
        """Return how often a loop runs.

        Args:
            loop: `Instruction`, a `while`.
            by_name: dict from name to `Instruction`, of its computation.

        The compiler may say so. Otherwise the loop counts up to a limit, as
        `jax.lax.fori_loop` does; then its start and limit are constants.

        Raises:
            ValueError: if the loop is of another form.
        """
        known = _TRIPS.search(loop.attributes)
        if known:
            return int(known[1])
        condition = self.computations[_CONDITION.search(loop.attributes)[1]]
        inside = {i.name: i for i in condition}
        initial = by_name[loop.operands[0]].operands

        def value(instruction, scope):
            if instruction.opcode == "constant":
                return int(instruction.literal)
            if instruction.opcode == "get-tuple-element" and scope is inside:
                index = int(_INDEX.search(instruction.attributes)[1])
                return value(by_name[initial[index]], by_name)
            return value(scope[instruction.operands[0]], scope)

        compare = condition[-1]
        try:
            start, limit = (value(inside[n], inside) for n in compare.operands)
        except (IndexError, KeyError, ValueError):
            start = None
        if start is None or "direction=LT" not in compare.attributes:
            raise ValueError(
                f"Cannot tell how often loop {loop.name} runs: it ends with "
                f"{compare.opcode}({', '.join(compare.operands)})."
            ) from None
        return limit - start


def parse_module(text):
    """Parse HLO text.

    Args:
        text: string, as `compiled.as_text()` gives it.

    Returns:
        A `Module`.

    Raises:
        ValueError: if the text is no scheduled HLO module.
    """
    if "is_scheduled=true" not in text[: text.find("\n")]:
        raise ValueError(
            "Expected the text of a scheduled HLO module, as "
            f"compiled.as_text() gives it. It begins: {text[:60]!r}."
        )
    entry, computations, current = None, {}, None
    for line in text.splitlines():
        if line.startswith((" ", "\t")):
            if current is not None and " = " in line:
                current.append(_parse_line(line))
            continue
        header = _HEADER.match(line)
        if header:
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        else:
            current = None
    return Module(entry, computations)


def _parse_line(line):
    name = _NAME.match(line)
    rest = line[name.end() :]
    # A tuple's shape is in parentheses; others have no space.
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end + 1 :]
    opcode, rest = rest.split("(", 1)
    end = _closing("(" + rest) - 1
    operands, attributes = rest[:end], rest[end + 1 :]
    names = tuple(_OPERAND.findall(operands))
    return Instruction(name[1], shape, opcode, names, operands, attributes)


def _closing(text):
    """Return where the parenthesis closes that `text` begins with."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"A parenthesis is not closed: {text[:80]!r}.")


def _first(pattern, text, default):
    match = pattern.search(text)
    return match[1] if match else default


@functools.lru_cache(maxsize=4096)
def shape_bytes(shape):
    """Return the bytes of a shape, a tuple's summed, layout left out."""
    total = 0
    for dtype, dims in _ARRAY.findall(shape):
        if dtype in _BITS:
            bits = _BITS[dtype]
        else:
            digits = re.search(r"\d+", dtype)
            if digits is None:
                continue
            bits = int(digits[0])
        size = np.prod(_ints(dims), dtype=np.int64)
        total += int(size) * bits // 8
    return total


@functools.lru_cache(maxsize=4096)
def device_groups(attributes):
    """Return the groups of devices of a collective.

    Args:
        attributes: string. Of the instruction. Three notations occur: a list,
            `[groups,devices]<=[dims]T(permutation)`, and a mesh with the axes
            of a group.

    Returns:
        An integer array `(groups, devices)`, or `None`.
    """
    listed = _LISTED.search(attributes)
    if listed:
        rows = re.findall(r"\{([\d,]*)\}", listed[1])
        return np.array([_ints(row) for row in rows])
    iota = _IOTA.search(attributes)
    if iota:
        return _iota(iota[2], iota[3]).reshape(_ints(iota[1]))
    mesh = _MESH.search(attributes)
    if mesh is None:
        return None
    sizes = {
        name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])
    }
    inside = re.findall(r"'(\w+)'", mesh[4])
    if ":" in mesh[4]:  # A part of an axis.
        return None
    dims = list(sizes.values())
    ids = _iota(mesh[2], mesh[3]) if mesh[2] else np.arange(np.prod(dims))
    order = [n for n in sizes if n not in inside] + inside
    ids = ids.reshape(dims).transpose([list(sizes).index(n) for n in order])
    return ids.reshape(-1, int(np.prod([sizes[n] for n in inside])))


def _iota(dims, permutation):
    ids = np.arange(np.prod(_ints(dims))).reshape(_ints(dims))
    return ids.transpose(_ints(permutation) if permutation else None)


def _ints(text):
    return [int(part) for part in text.split(",") if part]
