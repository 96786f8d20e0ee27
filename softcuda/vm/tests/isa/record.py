#!/usr/bin/env python3
"""Records what a real GPU computes, for tests/isa.rs.

    record.py <output file>

Each case is one PTX instruction over 64 operand triples, run through the
driver's own assembler. Needs libcuda.so.1 and a GPU, nothing else.
"""
import ctypes, random, struct, sys

N = 64
INT = {}
for bits in (16, 32, 64):
    top = 1 << (bits - 1)
    INT[bits] = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF,
                 top, top - 1, top + 1, 2 * top - 1, 2 * top - 2, 0x1234567890ABCDEF, 0xFEDCBA0987654321, 0x00FF00FF]
F32 = [0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F800001,
       0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F000000, 0x3FC00000, 0x40200000, 0xC0200000,
       0x4F000000, 0xCF000000, 0x4F800000, 0x5F000000, 0x5F800000, 0xDF000000, 0x33800000, 0x477FE000, 0x477FF000,
       0x38800000, 0x33000000, 0x387FC000, 0x40490FDB, 0x3DCCCCCD, 0x437F8000, 0x43000000]


def f64_of(bits32):
    return struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", bits32))[0]))[0]


F64 = [f64_of(x) for x in F32 if (x & 0x7FFFFFFF) <= 0x7F800000] + [
    0x7FF8000000000000, 0xFFF8000000001234, 0x0000000000000001, 0x7FEFFFFFFFFFFFFF, 0x3FF0000000000001,
    0x43E0000000000000, 0x41DFFFFFFFC00000, 0x41EFFFFFFFE00000, 0x36A0000000000000, 0x47EFFFFFE0000000,
    0x47EFFFFFF0000000, 0x3810000010000000, 0xC3E0000000000000]
F16 = [0, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x3800, 0x3E00, 0x4100, 0x6400, 0x1400]
BF16 = [0, 0x8000, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0x0001, 0x807F, 0x0080, 0x7F7F, 0xFF7F, 0x3F00, 0x3FC0, 0x4020, 0x4780, 0x3380]


def operands(kind, slot):
    rng = random.Random(f"{kind}/{slot}")
    out = []
    for i in range(N):
        edge = rng.random() < 0.6
        if kind[0] in "sub" and kind != "bf16" and kind != "bf16x2":
            bits = int(kind[1:])
            v = rng.choice(INT[bits]) if edge else rng.getrandbits(bits)
            v &= (1 << bits) - 1
        elif kind == "n":  # small numbers: shift amounts, positions
            v = rng.choice([0, 1, 4, 7, 8, 15, 16, 31, 32, 33, 40, 63, 64, 65, 255, 256, 0xFFFFFFFF]) if edge else rng.randrange(40)
        elif kind == "f32":
            v = rng.choice(F32) if edge else struct.unpack("<I", struct.pack("<f", rng.uniform(-1, 1) * 10 ** rng.randrange(-6, 11)))[0]
        elif kind == "f64":
            v = rng.choice(F64) if edge else struct.unpack("<Q", struct.pack("<d", rng.uniform(-1, 1) * 10 ** rng.randrange(-12, 20)))[0]
        else:
            half = lambda: rng.choice(BF16 if kind[0] == "b" else F16) if rng.random() < 0.5 else (
                rng.getrandbits(16) if kind[0] == "f" else rng.choice([0x3F00, 0xBF00, 0x4000, 0xC100]) + rng.getrandbits(8))
            v = half() | (half() << 16 if kind.endswith("x2") else 0)
        out.append(v)
    return out


CASES = []


def case(text, d, *kinds, tolerance=""):
    CASES.append((text, d, list(kinds), tolerance))


for t in ("s16", "u16", "s32", "u32", "s64", "u64"):
    for op in ("add", "sub", "mul.lo", "mul.hi", "div", "rem", "min", "max"):
        case(f"{op}.{t} d, a, b", t, t, t)
    case(f"mad.lo.{t} d, a, b, c", t, t, t, t)
    if t[1:] != "16":
        case(f"mad.hi.{t} d, a, b, c", t, t, t, t)
    case(f"sad.{t} d, a, b, c", t, t, t, t)
    case(f"shr.{t} d, a, b", t, t, "n")
    if t[0] == "s":
        case(f"abs.{t} d, a", t, t)
        case(f"neg.{t} d, a", t, t)
    if t[1:] != "64":
        wide = t[0] + str(2 * int(t[1:]))
        case(f"mul.wide.{t} d, a, b", wide, t, t)
        case(f"mad.wide.{t} d, a, b, c", wide, t, t, wide)
    if t[1:] != "16":
        case(f"bfe.{t} d, a, b, c", t, t, "n", "n")
        case(f"bfind.{t} d, a", "u32", t)
        case(f"bfind.shiftamt.{t} d, a", "u32", t)
    for cmp in ("eq", "ne", "lt", "le", "gt", "ge") + (("lo", "ls", "hi", "hs") if t[0] == "u" else ()):
        case(f"set.{cmp}.u32.{t} d, a, b", "u32", t, t)
for t in ("b16", "b32", "b64"):
    for op in ("and", "or", "xor"):
        case(f"{op}.{t} d, a, b", t, t, t)
    case(f"not.{t} d, a", t, t)
    case(f"cnot.{t} d, a", t, t)
    case(f"shl.{t} d, a, b", t, t, "n")
for t in ("b32", "b64"):
    case(f"popc.{t} d, a", "u32", t)
    case(f"clz.{t} d, a", "u32", t)
    case(f"brev.{t} d, a", t, t)
    case(f"bfi.{t} d, a, b, c, 5", t, t, t, "n")
    case(f"bfi.{t} d, a, b, 3, c", t, t, t, "n")
for t in ("s32", "u32"):
    for part in ("lo", "hi"):
        case(f"mul24.{part}.{t} d, a, b", t, t, t)
        case(f"mad24.{part}.{t} d, a, b, c", t, t, t, t)
    for u in ("s32", "u32"):
        case(f"dp4a.{t}.{u} d, a, b, c", "b32", t, u, "b32")
        case(f"dp2a.lo.{t}.{u} d, a, b, c", "b32", t, u, "b32")
        case(f"dp2a.hi.{t}.{u} d, a, b, c", "b32", t, u, "b32")
    case(f"szext.wrap.{t} d, a, b", t, t, "n")
    case(f"szext.clamp.{t} d, a, b", t, t, "n")
for op in ("add.sat.s32", "sub.sat.s32"):
    case(f"{op} d, a, b", "s32", "s32", "s32")
case("mad.hi.sat.s32 d, a, b, c", "s32", "s32", "s32", "s32")
case("mad24.hi.sat.s32 d, a, b, c", "s32", "s32", "s32", "s32")
case("fns.b32 d, a, b, c", "b32", "b32", "n", "s32")
case("bmsk.wrap.b32 d, a, b", "b32", "n", "n")
case("bmsk.clamp.b32 d, a, b", "b32", "n", "n")
for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"):
    case(f"prmt.b32{mode} d, a, b, c", "b32", "b32", "b32", "b32")
for side in "lr":
    for mode in ("wrap", "clamp"):
        case(f"shf.{side}.{mode}.b32 d, a, b, c", "b32", "b32", "b32", "n")
for lut in (0x80, 0xFE, 0x96, 0xC0, 0xFC, 0x3C, 0xF8, 0xEA, 0x1B, 0xD4, 0x00, 0xFF):
    case(f"lop3.b32 d, a, b, c, {lut}", "b32", "b32", "b32", "b32")
# Carry chains, both halves of what they give.
case("{ .reg .u32 x; add.cc.u32 x, a, b; addc.cc.u32 d, b, c; addc.u32 d, d, 0; }", "u32", "u32", "u32", "u32")
case("{ .reg .u32 x; sub.cc.u32 x, a, b; subc.cc.u32 d, b, c; subc.u32 d, d, 0; }", "u32", "u32", "u32", "u32")
case("{ .reg .u32 x; mad.lo.cc.u32 x, a, b, c; madc.hi.u32 d, a, b, 0; }", "u32", "u32", "u32", "u32")
case("{ .reg .u64 x; add.cc.u64 x, a, b; addc.u64 d, b, c; }", "u64", "u64", "u64", "u64")
case("{ .reg .u32 x; mad.hi.cc.s32 x, a, b, c; addc.u32 d, x, 0; }", "u32", "s32", "s32", "s32")
for mode in ("rn", "rz", "rm", "rp"):
    for t in ("f32", "f64"):
        for op in ("add", "sub", "mul", "div"):
            case(f"{op}.{mode}.{t} d, a, b", t, t, t)
        case(f"fma.{mode}.{t} d, a, b, c", t, t, t, t)
        case(f"rcp.{mode}.{t} d, a", t, t)
        case(f"sqrt.{mode}.{t} d, a", t, t)
    case(f"add.{mode}.ftz.f32 d, a, b", "f32", "f32", "f32")
    case(f"fma.{mode}.ftz.sat.f32 d, a, b, c", "f32", "f32", "f32", "f32")
case("mul.ftz.sat.f32 d, a, b", "f32", "f32", "f32")
case("mul.ftz.f32 d, a, b", "f32", "f32", "f32")
case("add.sat.f32 d, a, b", "f32", "f32", "f32")
case("sub.ftz.f32 d, a, b", "f32", "f32", "f32")
for t in ("f32", "f64"):
    for op in ("min", "max"):
        case(f"{op}.{t} d, a, b", t, t, t)
    case(f"abs.{t} d, a", t, t)
    case(f"neg.{t} d, a", t, t)
    case(f"copysign.{t} d, a, b", t, t, t)
    for cmp in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"):
        case(f"set.{cmp}.u32.{t} d, a, b", "u32", t, t)
    for what in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
        case(f"{{ .reg .pred p; testp.{what}.{t} p, a; selp.u32 d, 1, 0, p; }}", "u32", t)
case("set.lt.ftz.f32.f32 d, a, b", "f32", "f32", "f32")
case("slct.u32.s32 d, a, b, c", "u32", "u32", "u32", "s32")
case("slct.u64.f32 d, a, b, c", "u64", "u64", "u64", "f32")
case("{ .reg .pred p, q; setp.lt.u32 q, c, 100; setp.lt.and.s32 p, a, b, q; selp.b32 d, a, b, p; }", "b32", "s32", "s32", "u32")
case("{ .reg .pred p, q, r; setp.gt.u32 r, c, 100; setp.lt.xor.s32 p|q, a, b, !r; selp.b32 d, 1, 0, p; @q add.u32 d, d, 2; }", "b32", "s32", "s32", "u32")
for op in ("min", "max"):
    case(f"{op}.NaN.f32 d, a, b", "f32", "f32", "f32")
    case(f"{op}.ftz.f32 d, a, b", "f32", "f32", "f32")
    case(f"{op}.xorsign.abs.f32 d, a, b", "f32", "f32", "f32")
for op, t in (("ex2.approx.f32", 3e-7), ("ex2.approx.ftz.f32", 3e-7), ("rcp.approx.f32", 3e-7), ("rsqrt.approx.f32", 3e-7),
              ("sqrt.approx.f32", 3e-7), ("tanh.approx.f32", 6e-4)):
    case(f"{op} d, a", "f32", "f32", tolerance=str(t))
case("div.approx.f32 d, a, b", "f32", "f32", "f32", tolerance="3e-7")
case("div.full.f32 d, a, b", "f32", "f32", "f32", tolerance="3e-7")
for t in ("f16", "f16x2", "bf16", "bf16x2"):
    for op in ("add", "sub", "mul"):
        case(f"{op}.rn.{t} d, a, b", t, t, t)
    case(f"fma.rn.{t} d, a, b, c", t, t, t, t)
    case(f"fma.rn.relu.{t} d, a, b, c", t, t, t, t)
    for op in ("min", "max", "min.NaN", "max.NaN"):
        case(f"{op}.{t} d, a, b", t, t, t)
    case(f"neg.{t} d, a", t, t)
    case(f"abs.{t} d, a", t, t)
case("add.ftz.f16 d, a, b", "f16", "f16", "f16")
case("add.sat.f16x2 d, a, b", "f16x2", "f16x2", "f16x2")
for cmp in ("lt", "ne", "geu", "nan"):
    case(f"set.{cmp}.f16.f16 d, a, b", "f16", "f16", "f16")
    case(f"set.{cmp}.u32.f16 d, a, b", "u32", "f16", "f16")
    case(f"set.{cmp}.f16x2.f16x2 d, a, b", "f16x2", "f16x2", "f16x2")
    case(f"{{ .reg .pred p, q; setp.{cmp}.f16x2 p|q, a, b; selp.u32 d, 1, 0, p; @q add.u32 d, d, 2; }}", "u32", "f16x2", "f16x2")
    case(f"{{ .reg .pred p; setp.{cmp}.bf16 p, a, b; selp.u32 d, 1, 0, p; }}", "u32", "bf16", "bf16")
INTS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
reg = lambda t: {"8": t[0] + "16"}.get(t[1:], t)
for s in INTS:
    for d in INTS:
        if s != d:
            case(f"cvt.{d}.{s} d, a", reg(d), reg(s))
            if d[0] != s[0] or int(d[1:]) < int(s[1:]):
                case(f"cvt.sat.{d}.{s} d, a", reg(d), reg(s))
    for f in ("f16", "f32", "f64"):
        for mode in ("rn", "rz", "rm", "rp"):
            case(f"cvt.{mode}.{f}.{s} d, a", f, reg(s))
            case(f"cvt.{mode}i.{s}.{f} d, a", reg(s), f)
case("cvt.s32.u8 d, a", "s32", "u32")
case("cvt.s64.s16 d, a", "s64", "s32")
case("cvt.rzi.ftz.s32.f32 d, a", "s32", "f32")
case("cvt.rn.sat.f32.s32 d, a", "f32", "s32")
for mode in ("rn", "rz", "rm", "rp"):
    case(f"cvt.{mode}.f32.f64 d, a", "f32", "f64")
    case(f"cvt.{mode}.ftz.f32.f64 d, a", "f32", "f64")
    case(f"cvt.{mode}i.f32.f32 d, a", "f32", "f32")
    case(f"cvt.{mode}i.f64.f64 d, a", "f64", "f64")
    case(f"cvt.{mode}i.f16.f16 d, a", "f16", "f16")
for mode in ("rn", "rz"):
    case(f"cvt.{mode}.f16.f32 d, a", "f16", "f32")
    case(f"cvt.{mode}.bf16.f32 d, a", "bf16", "f32")
    case(f"cvt.{mode}.f16x2.f32 d, a, b", "f16x2", "f32", "f32")
    case(f"cvt.{mode}.bf16x2.f32 d, a, b", "bf16x2", "f32", "f32")
    case(f"cvt.{mode}.relu.bf16x2.f32 d, a, b", "bf16x2", "f32", "f32")
case("cvt.f32.f16 d, a", "f32", "f16")
case("cvt.f64.f16 d, a", "f64", "f16")
case("cvt.f32.bf16 d, a", "f32", "bf16")
case("cvt.rn.f16.f64 d, a", "f16", "f64")
case("cvt.f64.f32 d, a", "f64", "f32")
case("cvt.ftz.f64.f32 d, a", "f64", "f32")
case("cvt.sat.f32.f32 d, a", "f32", "f32")
case("cvt.ftz.f32.f32 d, a", "f32", "f32")
case("cvt.rna.tf32.f32 d, a", "b32", "f32")
case("cvt.rn.satfinite.e4m3x2.f32 d, a, b", "b16", "f32", "f32")
case("cvt.rn.satfinite.e5m2x2.f32 d, a, b", "b16", "f32", "f32")
case("cvt.rn.f16x2.e4m3x2 d, a", "f16x2", "b16")
case("cvt.rn.f16x2.e5m2x2 d, a", "f16x2", "b16")
case("cvt.rn.satfinite.e4m3x2.f16x2 d, a", "b16", "f16x2")
case("cvt.pack.sat.s8.s32.b32 d, a, b, c", "b32", "s32", "s32", "b32")
case("cvt.pack.sat.u8.s32.b32 d, a, b, c", "b32", "s32", "s32", "b32")
case("cvt.pack.sat.s16.s32 d, a, b", "b32", "s32", "s32")
case("mov.b32 d, {a, b};", "b32", "b16", "b16")
case("mov.b64 d, {a, b};", "b64", "b32", "b32")
case("mov.b64 d, {a, b, a, c};", "b64", "b16", "b16", "b16")
case("{ .reg .b32 x, y; mov.b64 {x, y}, a; sub.u32 d, y, x; }", "b32", "b64")
case("{ .reg .b16 x, y; mov.b32 {x, y}, a; sub.u16 d, y, x; }", "b16", "b32")
# Lanes together; the block's two warps are whole.
for mode in ("up", "down", "bfly", "idx"):
    for clamp in (0, 31, 0x1C03, 0x181F, 0x0F0F):
        case(f"{{ .reg .pred p; .reg .b32 x; shfl.sync.{mode}.b32 x|p, a, b, {clamp}, -1; selp.u32 d, 1, 0, p; mad.lo.u32 d, x, 2, d; }}", "b32", "b32", "n")
case("match.any.sync.b32 d, a, -1", "b32", "n")
case("{ .reg .pred p; match.all.sync.b64 d|p, a, -1; @p add.u32 d, d, 5; }", "b32", "u64")
for op in ("add", "min", "max"):
    case(f"redux.sync.{op}.s32 d, a, -1", "s32", "s32")
    case(f"redux.sync.{op}.u32 d, a, -1", "u32", "u32")
for op in ("and", "or", "xor"):
    case(f"redux.sync.{op}.b32 d, a, -1", "b32", "b32")
# Atomics by all threads on one word: the final value, at the first thread.
for op, t in (("add", "u32"), ("add", "u64"), ("min", "s32"), ("max", "s32"), ("min", "u32"), ("max", "u32"), ("min", "s64"),
              ("max", "u64"), ("and", "b32"), ("or", "b64"), ("xor", "b32")):
    case(f"{{ .reg .{t} old; atom.global.{op}.{t} old, [S], a; bar.sync 0; ld.volatile.global.{t} d, [S]; }}", t, t)
    case(f"{{ red.global.{op}.{t} [S], a; bar.sync 0; ld.volatile.global.{t} d, [S]; }}", t, t)


def bits_of(t):
    if t == "n" or t.endswith("x2"):
        return 32
    return int(t.lstrip("sufb"))


def ptx(text, d, kinds):
    out = [".version 8.0", ".target sm_90", ".address_size 64", ".visible .entry k(.param .u64 A, .param .u64 B, .param .u64 C, .param .u64 D, .param .u64 Q)", "{"]
    out += [".reg .u64 S, at, x0; .reg .u32 tid; .reg .u64 off;"]
    for name, t in zip("dabc", [d] + kinds):
        cls = "b32" if t == "n" or t.endswith("x2") else ("b16" if t in ("f16", "bf16", "s16", "u16") else t)
        out += [f".reg .{cls} {name};"]
    out += ["mov.u32 tid, %tid.x; mul.wide.u32 off, tid, 8; ld.param.u64 S, [Q];"]
    for name, t in zip("abc", kinds):
        out += [f"ld.param.u64 at, [{name.upper()}]; add.u64 at, at, off; ld.global.b{bits_of(t)} {name}, [at];"]
    out += [text + ("" if text[-1] in "};" else ";"), f"ld.param.u64 at, [D]; add.u64 at, at, off; st.global.b{bits_of(d)} [at], d;", "ret;", "}"]
    return "\n".join(out) + "\n"


def main(path):
    cuda = ctypes.CDLL("libcuda.so.1")

    def ok(r, what):
        if r:
            raise RuntimeError(f"{what}: CUDA error {r}")

    ok(cuda.cuInit(0), "init")
    dev, ctx = ctypes.c_int(), ctypes.c_void_p()
    ok(cuda.cuDeviceGet(ctypes.byref(dev), 0), "device")
    ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctx), dev), "context")
    ok(cuda.cuCtxSetCurrent(ctx), "context")
    buffers = []
    for _ in range(5):
        p = ctypes.c_uint64()
        ok(cuda.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(8 * N)), "alloc")
        buffers.append(p)
    with open(path, "w") as f:
        for kind in ["n", "f32", "f64", "f16", "f16x2", "bf16", "bf16x2"] + [s + b for s in "sub" for b in ("16", "32", "64")]:
            for slot in range(3):
                f.write(f"operands {kind} {slot} {' '.join('%x' % v for v in operands(kind, slot))}\n")
        for text, d, kinds, tolerance in CASES:
            source = ptx(text, d, kinds)
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            log = ctypes.create_string_buffer(2000)
            options = (ctypes.c_int * 2)(5, 6)  # error log buffer and its size
            values = (ctypes.c_void_p * 2)(ctypes.cast(log, ctypes.c_void_p), ctypes.c_void_p(2000))
            r = cuda.cuModuleLoadDataEx(ctypes.byref(module), source.encode(), 2, options, values)
            if r:
                print(f"skipped {text}: {log.value.decode().strip()[:200]}")
                continue
            ok(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"k"), "function")
            for slot, kind in enumerate(kinds):
                data = struct.pack(f"<{N}Q", *operands(kind, slot))
                ok(cuda.cuMemcpyHtoD_v2(buffers[slot], data, ctypes.c_size_t(8 * N)), "copy")
            for b in buffers[3:]:
                ok(cuda.cuMemsetD8_v2(b, 0, ctypes.c_size_t(8 * N)), "set")
            args = (ctypes.c_void_p * 5)(*[ctypes.cast(ctypes.byref(b), ctypes.c_void_p) for b in buffers])
            ok(cuda.cuLaunchKernel(function, 1, 1, 1, N, 1, 1, 0, None, args, None), "launch")
            ok(cuda.cuCtxSynchronize(), text)
            out = ctypes.create_string_buffer(8 * N)
            ok(cuda.cuMemcpyDtoH_v2(out, buffers[3], ctypes.c_size_t(8 * N)), "copy")
            words = struct.unpack(f"<{N}Q", out.raw)
            f.write(f"case|{text}|{d}|{','.join(kinds)}|{tolerance}|{' '.join('%x' % w for w in words)}\n")
            cuda.cuModuleUnload(module)


if __name__ == "__main__":
    main(sys.argv[1])
