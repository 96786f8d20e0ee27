#!/usr/bin/env python3
"""Assembles `prelude.ptx` for every architecture and writes `../src/cubin/templates.rs`.

    TALLY_PTXAS=/path/to/ptxas core/rewriter/templates/bake.py            # rewrite the table
    TALLY_PTXAS=/path/to/ptxas core/rewriter/templates/bake.py --check    # is it what this ptxas makes?

Only this machine code of our own prelude is kept. `ptxas` is NVIDIA's; the wheel
`nvidia-cuda-nvcc` (13.0.88 was used) has it. What a patch relies on is proved here
and nowhere else: that the code can be moved as it is, and that a shift of the control
block among the parameters changes nothing but the constant offsets in `FIXUPS`.
"""

import os
import pathlib
import struct
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE.parent / "src" / "cubin" / "templates.rs"
ARCHITECTURES = (80, 86, 89, 90)
# Where the control block lies among the parameters: 0 is kept, the others must follow from it. The last is the
# largest that a patch uses (beyond 4 KiB of parameters, ptxas makes other code).
OFFSETS = (0, 8, 16, 504, 1000, 2048, 3336, 4040)
PTX_VERSION = "8.1"
MARKER = 0x1234
WORD_SHIFT = 38  # of a constant's byte offset in an instruction
CONTROL_SHIFT = 105
BLOCK_BYTES = 56

BRA, CALL_REL, BSSY, RET_REL, NOP, NANOSLEEP = 0x947, 0x944, 0x945, 0x950, 0x918, 0x95D
INFO = {
    "api_version": 0x37, "cbank_param_size": 0x19, "param_cbank": 0x0A, "kparam_info": 0x17, "maxreg": 0x1B,
    "exits": 0x1C, "coop_offsets": 0x28, "coop_registers": 0x29, "ctaid_z": 0x04, "crs_stack": 0x1E,
}  # fmt: skip
# Compiler's bookkeeping that every kernel of the architecture has, the empty one too.
REGCOUNT = 0x2F

PROBE = """.version VERSION
.target TARGET
.address_size 64
.visible .const .align 4 .f32 user[4] = {0f3F800000, 0f40000000, 0f40400000, 0f40800000};
.visible .entry empty() { ret; }
.visible .entry grid(.param .u64 out)
{
    .reg .b32 %r<3>;
    .reg .b64 %d<2>;
    ld.param.u64 %d1, [out];
    mov.u32 %r1, %envreg1;
    mov.u32 %r2, %envreg2;
    st.global.u32 [%d1], %r1;
    st.global.u32 [%d1+4], %r2;
    ret;
}
.visible .entry launch(.param .u64 out)
{
    .reg .b64 %d<4>;
    ld.param.u64 %d1, [out];
    mov.u64 %d2, %gridid;
    mov.u64 %d3, %current_graph_exec;
    st.global.u64 [%d1], %d2;
    st.global.u64 [%d1+8], %d3;
    ret;
}
.visible .entry constants(.param .u64 out)
{
    .reg .b64 %d<4>;
    ld.param.u64 %d1, [out];
    mov.u64 %d2, user;
    cvta.const.u64 %d3, %d2;
    st.global.u64 [%d1], %d3;
    ret;
}
.visible .entry neither(.param .u64 out)
{
    .reg .b64 %d<2>;
    ld.param.u64 %d1, [out];
    st.global.u64 [%d1], 0;
    ret;
}
"""


def fail(message):
    sys.exit(f"bake.py: {message}")


def need(condition, message):
    if not condition:
        fail(message)


class Cubin:
    """Just enough of an ELF file made by ptxas."""

    def __init__(self, image):
        offset, = struct.unpack_from("<Q", image, 40)
        size, count, names = struct.unpack_from("<HHH", image, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", image, offset + i * size) for i in range(count)]
        strings = image[headers[names][4] :][: headers[names][5]]
        self.sections = {}
        for header in headers[1:]:
            name = strings[header[0] : strings.index(b"\0", header[0])].decode()
            self.sections[name] = image[header[4] : header[4] + header[5]] if header[1] != 8 else b""

    def code(self, kernel):
        text = self.sections[".text." + kernel]
        return [int.from_bytes(text[i : i + 16], "little") for i in range(0, len(text), 16)]

    def info(self, section):
        data, at, found = self.sections[section], 0, []
        while at < len(data):
            form, attribute, value = struct.unpack_from("<BBH", data, at)
            at += 4
            payload = data[at : at + value] if form == 4 else value
            at += value if form == 4 else 0
            found.append((attribute, payload))
        return found


def assemble(source, arch):
    source = source.replace("VERSION", PTX_VERSION).replace("TARGET", f"sm_{arch}")
    ptxas = os.environ.get("TALLY_PTXAS") or fail("TALLY_PTXAS does not name a ptxas")
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = pathlib.Path(folder, "a.ptx"), pathlib.Path(folder, "a.cubin")
        ptx.write_text(source)
        subprocess.run([ptxas, f"-arch=sm_{arch}", str(ptx), "-o", str(cubin)], check=True)
        return Cubin(cubin.read_bytes())


def opcode(instruction):
    return instruction & 0xFFF


def target(arch, instruction, index):
    """Byte offset that a relative jump at an index goes to, or None."""
    if opcode(instruction) not in (BRA, CALL_REL, BSSY):
        return None
    if opcode(instruction) == BSSY:
        offset, bits = instruction >> 32 & 0xFFFFFFFF, 32
    elif arch >= 90:
        offset, bits = ((instruction >> 16 & 0xFF) | (instruction >> 34 & (1 << 48) - 1) << 8) << 2, 58
    else:
        offset, bits = instruction >> 32 & (1 << 50) - 1, 50
    if offset >> (bits - 1):
        offset -= 1 << bits
    # The lowest bits belong to another field where the branch looks at divergence.
    return index * 16 + 16 + (offset & ~3)


def constants(code):
    """Byte offsets in bank 0 that instructions with a constant operand name."""
    found = set()
    for instruction in code:
        if opcode(instruction) >> 9 in (3, 5) and instruction >> 54 & 31 == 0:
            found.add(instruction >> WORD_SHIFT & 0xFFFF)
    return found


def words(probe, kernel):
    """Words of the driver that a kernel reads and another does not."""
    return sorted(constants(probe.code(kernel)) - constants(probe.code("neither")))


def template(arch, offset):
    source = (HERE / "prelude.ptx").read_text()
    pad = f".param .align 8 .b8 pad[{offset}], " if offset else ""
    cubin = assemble(source.replace("PAD", pad), arch)
    code = cubin.code("prelude")
    while opcode(code[-1]) == NOP:
        code.pop()
    # The jump to itself that guards a function's end.
    need(target(arch, code[-1], len(code) - 1) == (len(code) - 1) * 16, f"sm_{arch}: no guard at the end")
    code.pop()
    return cubin, code


def bake(arch):
    cubin, code = template(arch, 0)
    where = f"sm_{arch}"
    end = len(code) * 16
    for index, instruction in enumerate(code):
        to = target(arch, instruction, index)
        need(to is None or 16 <= to < end, f"{where}: a jump at {index} leaves the code ({to})")
        if opcode(instruction) == RET_REL:
            # Returns to an address that counts from the function's start, which it has as its own offset.
            need(instruction >> 32 & 0xFFFFFFFF == (-(index * 16 + 16)) & 0xFFFFFFFF, f"{where}: return at {index}")
    body = code[1:]
    markers = [i for i, x in enumerate(body) if opcode(x) == NANOSLEEP and x >> 32 & 0xFFFFFFFF == MARKER]
    need(len(markers) == 1, f"{where}: {len(markers)} markers")
    need(all(x >> 16 & 0xFF != 1 or opcode(x) in (BRA, BSSY) for x in body), f"{where}: the stack pointer is written")

    # Moved by an offset, only the fix-ups change, and by just that.
    fixups = None
    for offset in OFFSETS[1:]:
        _, moved = template(arch, offset)
        moved = moved[1:]
        need(len(moved) == len(body), f"{where}: another length at {offset}")
        changed = [i for i, (a, b) in enumerate(zip(body, moved)) if a != b]
        fixups = fixups or changed
        need(changed == fixups, f"{where}: other instructions change at {offset}")
        for i in changed:
            need(moved[i] == body[i] + (offset << WORD_SHIFT), f"{where}: instruction {i} is not moved by {offset}")

    empty = assemble(PROBE, arch)
    usual = {attribute for attribute, _ in empty.info(".nv.info.empty")}
    info = cubin.info(".nv.info.prelude")
    extra = {attribute for attribute, _ in info} - usual - set(INFO.values())
    need(not extra, f"{where}: attributes that the patch does not carry over: {[hex(x) for x in extra]}")

    def offsets(name):
        found = [x for a, v in info if a == INFO[name] for x in struct.unpack(f"<{len(v) // 4}I", v)]
        # Counted from the body's start; the exit after the marker is left behind too, but harmless.
        return [x - 16 for x in found if 16 <= x < end]

    masks = b"".join(v for a, v in info if a == INFO["coop_registers"])
    need(masks == b"\xff" * 4 * len(offsets("coop_offsets")), f"{where}: votes with masks in registers")
    first = {x & (1 << CONTROL_SHIFT) - 1 for x in [code[0], *(empty.code(k)[0] for k in ("grid", "constants", "empty"))]}
    return {
        "arch": arch,
        "first": sorted(first),
        "body": body,
        "marker": markers[0],
        "fixups": fixups,
        "exits": offsets("exits"),
        "votes": offsets("coop_offsets"),
        "ctaid_z": any(a == INFO["ctaid_z"] for a, _ in info),
        "convergence": any(a == INFO["crs_stack"] for a, _ in info),
        "registers": next(struct.unpack("<II", v)[1] for a, v in cubin.info(".nv.info") if a == REGCOUNT),
        "parameter_base": next(struct.unpack("<IHH", v)[1] for a, v in info if a == INFO["param_cbank"]),
        "grid_words": words(empty, "grid"),
        # Of eight bytes each.
        "launch_words": sorted({half for word in words(empty, "launch") for half in (word & ~7, word | 4)}),
        "constant_words": words(empty, "constants"),
    }


def rust(templates):
    out = [
        "//! Made by `templates/bake.py`: the machine code of `templates/prelude.ptx`. Do not edit.",
        "",
        "use super::template::Template;",
        "",
        "/// One for each architecture that machine code can be patched for.",
        f"pub(super) static TEMPLATES: [Template; {len(templates)}] = [",
    ]
    for t in templates:
        out.append("    Template {")
        for key, value in t.items():
            if key in ("body", "first"):
                out.append(f"        {key}: &[")
                out += [f"            0x{x:032x}," for x in value]
                out.append("        ],")
            elif isinstance(value, list):
                out.append(f"        {key}: &[{', '.join(map(str, value))}],")
            else:
                out.append(f"        {key}: {str(value).lower()},")
        out.append("    },")
    return "\n".join(["#[rustfmt::skip]\n" + x if x.startswith("pub(super)") else x for x in out] + ["];", ""])


def main():
    text = rust([bake(arch) for arch in ARCHITECTURES])
    if "--check" in sys.argv[1:]:
        need(OUT.read_text() == text, f"{OUT} is not what this ptxas makes of prelude.ptx")
        return
    OUT.write_text(text)
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
