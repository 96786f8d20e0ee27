//! Components that are made to hurt whoever compiles them.

mod common;

use common::{bare_host, compiler, guest, limits};
use std::time::{Duration, Instant};
use tally_harness::components::{bulky, leb, nested};
use tally_wasm_host::{
    Cancel, CompileError, Compiler, ComponentFile, HostError, Limits, LoadError, PolicyHost,
};

fn refusal(limits: Limits, bytes: &[u8]) -> LoadError {
    bare_host(limits).compile_bytes("bomb.wasm", bytes).expect_err("a refusal")
}

fn own_memory_kib(what: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(what)).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn nested_components_are_refused_before_anything_is_built() {
    let bytes = nested(20_000);
    assert_eq!(bytes.len(), 238_506);
    let before = own_memory_kib("VmHWM:");
    let error = refusal(limits(), &bytes);
    assert!(matches!(error, LoadError::TooMany { .. }), "{error}");
    let said = error.to_string();
    for part in ["bomb.wasm", "8 levels of components", "fewer or smaller parts"] {
        assert!(said.contains(part), "{said}");
    }
    // 7.9 GB before; in this process, for no compiler is started.
    let grown = own_memory_kib("VmHWM:") - before;
    assert!(grown < 100 << 10, "{grown} KiB");
}

/// A type's index, where a negative number would be a primitive type.
fn index(n: usize) -> Vec<u8> {
    let mut bytes = leb(n);
    let last = bytes.len() - 1;
    if bytes[last] & 0x40 != 0 {
        bytes[last] |= 0x80;
        bytes.push(0);
    }
    bytes
}

/// A component with a section of so many types, as the audit made them.
fn types(first: &[u8], count: usize, each: impl Fn(usize) -> Vec<u8>) -> Vec<u8> {
    let mut all = leb(count + 1);
    all.extend(first);
    (0..count).for_each(|i| all.extend(each(i)));
    [b"\0asm\x0d\0\x01\0\x07", &*leb(all.len()), &all].concat()
}

/// Types of types, each of the one before: long chains, and some whose size doubles with each.
#[test]
fn chains_of_types_are_refused_in_little_memory() {
    const DECLARES: &[u8] = b"\x04\x00\x01a\x05";
    // An instance type that names the one before, and exports the first so many times.
    let instance = |i: usize, exports: &[&[u8]]| {
        let mut declarations = leb(1 + exports.len());
        declarations.extend([b"\x02\x03\x02\x01", &*leb(i)].concat());
        exports.iter().for_each(|export| declarations.extend([export, &*leb(0)].concat()));
        [b"\x42", &*declarations].concat()
    };
    let other: &[u8] = b"\x04\x00\x01b\x05";
    type Each<'a> = &'a dyn Fn(usize) -> Vec<u8>;
    let kinds: [(&str, &[u8], Each<'_>); 5] = [
        ("lists", b"\x70\x7d", &|i| [b"\x70", &*index(i)].concat()),
        ("options", b"\x6b\x7d", &|i| [b"\x6b", &*index(i)].concat()),
        ("tuples of two", b"\x6f\x02\x7d\x7d", &|i| [b"\x6f\x02", &*index(i), &*index(i)].concat()),
        ("instances", b"\x42\x00", &|i| instance(i, &[DECLARES])),
        ("instances of two", b"\x42\x00", &|i| instance(i, &[DECLARES, other])),
    ];
    let before = own_memory_kib("VmHWM:");
    for (kind, first, each) in kinds {
        for count in [30, 1_000, 100_000] {
            let error = refusal(limits(), &types(first, count, each));
            // A compiler that panics takes nobody with it.
            let is_bounded = matches!(
                error,
                LoadError::TooMany { .. }
                    | LoadError::Invalid { .. }
                    | LoadError::MissingExport { .. }
                    | LoadError::NotCompiled { error: CompileError::Crashed { .. }, .. }
            );
            assert!(is_bounded, "{count} {kind}: {error}");
            let too_many = matches!(error, LoadError::TooMany { .. });
            assert!(too_many || count < 100_000, "{count} {kind}: {error}");
        }
    }
    let grown = own_memory_kib("VmHWM:") - before;
    assert!(grown < 100 << 10, "{grown} KiB");
}

#[test]
fn a_component_that_takes_too_much_memory_is_stopped_by_name() {
    let limits = Limits { compile_memory_bytes: 32 << 20, ..limits() };
    let error = refusal(limits, &bulky(12));
    assert!(
        matches!(error, LoadError::OverBudget { error: CompileError::Memory(_), .. }),
        "{error}"
    );
    let said = error.to_string();
    for part in ["bomb.wasm", "32 MiB of memory", "raise `compile_memory_bytes` (now 33554432)"] {
        assert!(said.contains(part), "{said}");
    }
}

#[test]
fn a_component_that_takes_too_long_is_stopped_by_name() {
    let limits = Limits { compile_cpu_s: 1, ..limits() };
    let error = refusal(limits, &bulky(60));
    assert!(
        matches!(error, LoadError::OverBudget { error: CompileError::CpuTime(1), .. }),
        "{error}"
    );
    let said = error.to_string();
    assert!(said.contains("1 s of CPU time") && said.contains("`compile_cpu_s` (now 1)"), "{said}");
}

#[test]
fn native_code_is_bounded() {
    let bytes = bulky(2);
    let engine = wasmtime::Engine::new(&tally_compiler::settings()).unwrap();
    let compile = |output_bytes| {
        let limits =
            tally_compiler::CompileLimits { memory_bytes: 512 << 20, cpu_s: 60, output_bytes };
        compiler().compile(&engine, &bytes, limits, &Cancel::never()).map(drop)
    };
    assert!(matches!(compile(64 << 10), Err(CompileError::Output(65_536))));
    compile(64 << 20).unwrap();
    // Sixteen times the file, which is as long as it may be, is enough.
    let limits = Limits { component_bytes_max: bytes.len(), ..limits() };
    let error = refusal(limits.clone(), &bytes);
    assert!(matches!(error, LoadError::MissingExport { .. }), "{error}");
    let policy = std::fs::read(guest("policies", "fifo")).unwrap();
    let limits = Limits { component_bytes_max: policy.len(), ..limits };
    bare_host(limits).compile_bytes("fifo", &policy).unwrap();
}

#[test]
fn a_compilation_is_cancelled_at_once_and_another_one_goes_on() {
    let host = bare_host(limits());
    let file = ComponentFile::from_memory("bomb.wasm", bulky(60));
    let cancel = Cancel::new().unwrap();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let compiling = scope.spawn(|| host.compile(&file, &cancel));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!compiling.is_finished(), "it takes seconds");
        cancel.cancel();
        let error = compiling.join().unwrap().err().unwrap();
        assert!(matches!(error, LoadError::Cancelled { .. }), "{error}");
    });
    let cancelled = begun.elapsed();
    assert!(cancel.is_cancelled());
    let error = host.compile(&file, &cancel).err().unwrap();
    assert!(matches!(error, LoadError::Cancelled { .. }), "{error}");
    // No process is left.
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let children = std::fs::read_to_string(task.unwrap().path().join("children")).unwrap();
        assert_eq!(children.trim(), "", "after {cancelled:?}");
    }
    host.compile_file(&guest("policies", "fifo")).unwrap();
}

#[test]
fn a_program_that_cannot_be_its_own_compiler_is_told_so() {
    // The `main` of a test is not ours.
    let error = PolicyHost::new(limits()).err().unwrap();
    assert!(matches!(error, HostError::Compiler(CompileError::NotServed)), "{error}");
    assert!(error.to_string().contains("serve_if_child"), "{error}");

    let fifo = std::fs::read(guest("policies", "fifo")).unwrap();
    for (program, said) in [("/nonexistent", "cannot be started"), ("/bin/true", "exit code 0")] {
        let host = PolicyHost::compiling_by(Compiler::program(program), limits()).unwrap();
        let error = host.compile_bytes("fifo.wasm", &fifo).err().unwrap();
        assert!(matches!(error, LoadError::NotCompiled { .. }), "{error}");
        assert!(error.to_string().contains(said), "{error}");
    }
}

/// What a compiler hands over that is none of ours is not run.
#[test]
fn code_of_other_settings_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let fifo = std::fs::read(guest("policies", "fifo")).unwrap();
    let good = wasmtime::Engine::default().precompile_component(&fifo).unwrap();
    for (name, code) in
        [("settings", &good[..]), ("cut", &good[..good.len() / 2]), ("text", b"hello")]
    {
        let made = folder.path().join(name);
        std::fs::write(&made, code).unwrap();
        let program = folder.path().join(format!("{name}.sh"));
        std::fs::write(&program, format!("#!/bin/sh\nexec /bin/cat {}\n", made.display())).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        let host = PolicyHost::compiling_by(Compiler::program(program), limits()).unwrap();
        let error = host.compile_bytes("fifo.wasm", &fifo).err().unwrap();
        assert!(
            matches!(error, LoadError::NotCompiled { .. } | LoadError::Invalid { .. }),
            "{name}: {error}"
        );
    }
}

#[test]
fn the_compiler_gives_the_same_policy_as_this_process() {
    let fifo = guest("policies", "fifo");
    let inside = PolicyHost::compiling_by(Compiler::in_process(), limits()).unwrap();
    let outside = PolicyHost::compiling_by(compiler(), limits()).unwrap();
    let fuel = |host: &PolicyHost| {
        let mut bench = common::Bench::new(host.load_file(&fifo, "").unwrap());
        let answer = bench.decide(0).unwrap();
        (answer, bench.policy.call_fuel())
    };
    assert_eq!(fuel(&inside), fuel(&outside));
}

/// What one call of an exported function of a module costs.
fn fuel(text: &str) -> u64 {
    const MUCH: u64 = 1 << 40;
    let engine = wasmtime::Engine::new(&tally_compiler::settings()).unwrap();
    let module = wasmtime::Module::new(&engine, wat::parse_str(text).unwrap()).unwrap();
    let mut store = wasmtime::Store::new(&engine, ());
    store.set_epoch_deadline(1 << 40);
    store.set_fuel(MUCH).unwrap();
    let instance = wasmtime::Instance::new(&mut store, &module, &[]).unwrap();
    let function = instance.get_typed_func::<(), ()>(&mut store, "f").unwrap();
    function.call(&mut store, ()).unwrap();
    MUCH - store.get_fuel().unwrap()
}

#[test]
fn filling_memory_and_tables_costs_fuel() {
    let memory = |bytes: u32| {
        let fill = "(memory.fill (i32.const 0) (i32.const 7) (i32.const BYTES))";
        let fill = fill.replace("BYTES", &bytes.to_string());
        fuel(&format!("(module (memory 256) (func (export \"f\") {fill}))"))
    };
    let table = |items: u32| {
        let fill = "(table.fill (i32.const 0) (ref.null func) (i32.const ITEMS))";
        let fill = fill.replace("ITEMS", &items.to_string());
        fuel(&format!("(module (table 10000 funcref) (func (export \"f\") {fill}))"))
    };
    assert!(memory(15 << 20) - memory(1) >= (15 << 20) / 64, "{}", memory(15 << 20));
    assert!(table(10_000) - table(1) >= 10_000 / 64, "{}", table(10_000));
}
