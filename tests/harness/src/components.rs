//! Components that hurt whoever compiles them.

const HEADER: &[u8] = b"\0asm\x0d\0\x01\0";
/// Sections of a component.
const CORE_MODULE: u8 = 1;
const COMPONENT: u8 = 4;

/// A number as binary formats have it.
pub fn leb(mut n: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while n > 0x7f {
        bytes.push(n as u8 | 0x80);
        n >>= 7;
    }
    bytes.push(n as u8);
    bytes
}

/// So many modules of 50 functions of some 1 000 instructions each, none of which a compiler can leave out. 20 take a
/// second or more to compile.
///
/// # Panics
/// Never: the text is right.
pub fn bulky(modules: usize) -> Vec<u8> {
    let step =
        "(local.set 0 (i64.mul (i64.xor (local.get 0) (i64.load (i32.wrap_i64 (local.get 0))))
        (i64.const 6364136223846793005)))";
    let function = format!("(func (param i64) (result i64) {} (local.get 0))\n", step.repeat(160));
    let module = wat::parse_str(format!("(module (memory 1) {})", function.repeat(50))).unwrap();
    let section = [&[CORE_MODULE][..], &leb(module.len()), &module].concat();
    [HEADER, &section.repeat(modules)].concat()
}

/// Components in one another: so many below the outermost.
pub fn nested(levels: usize) -> Vec<u8> {
    let mut backwards: Vec<u8> = HEADER.iter().rev().copied().collect();
    for _ in 0..levels {
        let size = leb(backwards.len());
        backwards.extend(size.iter().rev());
        backwards.push(COMPONENT);
        backwards.extend(HEADER.iter().rev());
    }
    backwards.reverse();
    backwards
}
