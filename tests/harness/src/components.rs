//! Components that hurt whoever compiles them.

use wasm_encoder::{CodeSection, Function, FunctionSection, MemArg, MemorySection, MemoryType};
use wasm_encoder::{Module, TypeSection, ValType};

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
pub fn bulky(modules: usize) -> Vec<u8> {
    let (mut types, mut functions, mut code) =
        (TypeSection::new(), FunctionSection::new(), CodeSection::new());
    types.ty().function([ValType::I64], [ValType::I64]);
    let mut function = Function::new([]);
    let mut body = function.instructions();
    for _ in 0..160 {
        body.local_get(0).local_get(0).i32_wrap_i64();
        body.i64_load(MemArg { offset: 0, align: 3, memory_index: 0 });
        body.i64_xor().i64_const(6_364_136_223_846_793_005).i64_mul().local_set(0);
    }
    body.local_get(0).end();
    for _ in 0..50 {
        functions.function(0);
        code.function(&function);
    }
    let mut memories = MemorySection::new();
    let (maximum, page_size_log2) = (None, None);
    memories.memory(MemoryType {
        minimum: 1,
        maximum,
        memory64: false,
        shared: false,
        page_size_log2,
    });
    let mut module = Module::new();
    module.section(&types).section(&functions).section(&memories).section(&code);
    let module = module.finish();
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
