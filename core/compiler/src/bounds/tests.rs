use super::*;
use wasm_encoder as enc;

const HEADER: &[u8] = b"\0asm\x0d\0\x01\0";

fn leb(mut n: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while n > 0x7f {
        bytes.push(n as u8 | 0x80);
        n >>= 7;
    }
    bytes.push(n as u8);
    bytes
}

fn section(id: u8, data: &[u8]) -> Vec<u8> {
    [&[id], leb(data.len()).as_slice(), data].concat()
}

fn component(sections: &[Vec<u8>]) -> Vec<u8> {
    [HEADER, &sections.concat()].concat()
}

/// Components in one another: so many below the outermost. Written from the innermost outwards, backwards.
fn nested(levels: usize) -> Vec<u8> {
    let mut backwards: Vec<u8> = HEADER.iter().rev().copied().collect();
    for _ in 0..levels {
        let size = leb(backwards.len());
        backwards.extend(size.iter().rev());
        backwards.push(4);
        backwards.extend(HEADER.iter().rev());
    }
    backwards.reverse();
    backwards
}

fn refused(bytes: &[u8]) -> String {
    check(bytes).expect_err("too many").to_string()
}

fn wat(text: &str) -> Vec<u8> {
    wat::parse_str(text).unwrap()
}

#[test]
fn components_within_components_are_refused_without_being_built() {
    check(&nested(8)).unwrap();
    for levels in [9, 20_000, 1_000_000] {
        let said = refused(&nested(levels));
        assert_eq!(said, "it has more than 8 levels of components within one another");
    }
    // That of the audit.
    assert_eq!(nested(20_000).len(), 238_506);
}

#[test]
fn counts_are_bounded_by_name() {
    let part = section(4, HEADER);
    check(&component(&vec![part.clone(); 256])).unwrap();
    assert!(refused(&component(&vec![part; 257])).contains("256 modules and components"));

    // Of module 0, without arguments.
    let instance = section(2, &[1, 0, 0, 0]);
    let modules = wat("(component (core module))");
    let with = |instances: usize| [modules.clone(), instance.repeat(instances)].concat();
    check(&with(1_000)).unwrap();
    assert!(refused(&with(1_001)).contains("1000 instances"));

    // Types by their count alone, which does not have to be true.
    let module = |sections: &[u8]| section(1, &[b"\0asm\x01\0\0\0".as_slice(), sections].concat());
    let types = [leb(50_001), b"\x60\0\0".repeat(50_001)].concat();
    assert!(refused(&component(&[module(&section(1, &types))])).contains("50000 types"));
    let functions = [leb(100_001), vec![0; 100_001]].concat();
    let functions = component(&[module(&section(3, &functions))]);
    assert!(refused(&functions).contains("100000 functions"));
    // Empty sections hold nothing and still take time.
    let empty = component(&vec![section(0, b"\0"); 200_001]);
    assert!(refused(&empty).contains("sections"));
}

#[test]
fn types_declared_in_types_count() {
    // Instance types of 100 declarations, each of which is a type.
    let declarations = [&[0x42, 100][..], &[1, 0x7f].repeat(100)].concat();
    let types = [leb(600), declarations.repeat(600)].concat();
    assert!(refused(&component(&[section(7, &types)])).contains("50000 types"));
    let few = [leb(100), declarations.repeat(100)].concat();
    check(&component(&[section(7, &few)])).unwrap();
}

#[test]
fn a_function_and_its_local_variables_are_bounded() {
    let with = |locals: u32, nops: usize, functions: usize| {
        let mut code = enc::CodeSection::new();
        for _ in 0..functions {
            let mut body = enc::Function::new([(locals, enc::ValType::I32)]);
            body.raw(vec![1; nops]);
            body.instructions().end();
            code.function(&body);
        }
        let mut types = enc::TypeSection::new();
        types.ty().function([], []);
        let mut declared = enc::FunctionSection::new();
        for _ in 0..functions {
            declared.function(0);
        }
        let mut module = enc::Module::new();
        module.section(&types).section(&declared).section(&code);
        let mut component = enc::Component::new();
        component.section(&enc::ModuleSection(&module));
        component.finish()
    };
    check(&with(0, (1 << 20) - 8, 1)).unwrap();
    assert!(refused(&with(0, 1 << 20, 1)).contains("1048576 bytes in one function"));
    check(&with(40_000, 0, 100)).unwrap();
    assert!(refused(&with(40_000, 0, 101)).contains("4000000 local variables"));
}

#[test]
fn what_cannot_be_read_is_invalid() {
    for bytes in [&b"\0asm\x0d\0\x01\0\x07\x05\x01"[..], b"\0asm\x09"] {
        assert!(matches!(check(bytes), Err(CompileError::Invalid(_))), "{bytes:x?}");
    }
}
