//! A forwarded function does the same, components that cannot be rewritten are left as they are, and indices stay
//! right.

use super::*;
use proptest::prelude::*;
use std::path::PathBuf;
use wasmtime::component::{Component, Linker};
use wasmtime::{Config, Engine, InstanceAllocationStrategy, PoolingAllocationConfig, Store};

/// Four functions of one module, two of them to be forwarded, in the order in which the component
/// tools have them: each alias beside its lift. `$more` stands last.
fn component(more: &str) -> Vec<u8> {
    let lift = |name: &str, is: &str| {
        format!(
            r#"(alias core export $main "{name}" (core func ${is}))
            (func $lifted-{is} (param "a" u32) (param "b" u64) (result string)
                (canon lift (core func ${is}) (memory $memory) (realloc $realloc) (post-return $post)))
            (export "{is}" (func $lifted-{is}))"#
        )
    };
    let func = |name: &str, n: u32| {
        format!(
            r#"(func (export "{name}") (param i32 i64) (result i32)
                (i32.store8 (i32.const 64) (i32.add (local.get 0) (i32.const {n})))
                (i32.store8 (i32.const 65) (i32.add (i32.wrap_i64 (local.get 1)) (global.get $posts)))
                (i32.store (i32.const 0) (i32.const 64))
                (i32.store (i32.const 4) (i32.const 2))
                (i32.const 0))"#
        )
    };
    let names = ["x#init", "x#decide", "x#completed", "x#last"];
    let is = ["init", "decide", "event", "last"];
    let funcs: String = (10..).zip(names).map(|(n, name)| func(name, n)).collect();
    let lifts: String = names.into_iter().zip(is).map(|(name, is)| lift(name, is)).collect();
    let text = format!(
        r#"(component
            (core module $code
                (memory (export "memory") 1)
                (global $posts (mut i32) (i32.const 48))
                (func (export "realloc") (param i32 i32 i32 i32) (result i32) (i32.const 128))
                (func (export "post") (param i32)
                    (global.set $posts (i32.add (global.get $posts) (i32.const 1))))
                {funcs})
            (core instance $main (instantiate $code))
            (alias core export $main "memory" (core memory $memory))
            (alias core export $main "realloc" (core func $realloc))
            (alias core export $main "post" (core func $post))
            {lifts}
            {more})"#
    );
    wat::parse_str(text).unwrap()
}

fn is_valid(bytes: &[u8]) -> bool {
    Validator::new_with_features(WasmFeatures::all()).validate_all(bytes).is_ok()
}

/// What its four functions answer, called in turns, and the fuel that they have used.
fn answers(bytes: &[u8]) -> (Vec<String>, u64) {
    const FUEL: u64 = 1_000_000;
    let engine = Engine::new(Config::new().consume_fuel(true)).unwrap();
    let component = Component::new(&engine, bytes).unwrap();
    let mut store = Store::new(&engine, ());
    store.set_fuel(FUEL).unwrap();
    let instance = Linker::new(&engine).instantiate(&mut store, &component).unwrap();
    let mut said = Vec::new();
    for i in 0..8_u32 {
        let name = ["decide", "last", "init", "event"][i as usize % 4];
        let func = instance.get_typed_func::<(u32, u64), (String,)>(&mut store, name).unwrap();
        said.push(func.call(&mut store, (48 + i, 5)).unwrap().0);
    }
    (said, FUEL - store.get_fuel().unwrap())
}

#[test]
fn a_forwarded_function_does_the_same_for_the_same_fuel() {
    let whole = component("");
    let short = shortened(&whole).unwrap();
    // One module more for each of the two.
    let modules = |bytes| {
        let payloads = Parser::new(0).parse_all(bytes);
        payloads.filter(|p| matches!(p, Ok(Payload::ModuleSection { .. }))).count()
    };
    assert_eq!((modules(&whole), modules(&short)), (1, 3));
    assert_eq!(answers(&short), answers(&whole));
    // Four functions tell themselves apart, and each call was followed by one of `post`.
    assert_eq!(answers(&whole).0[..4], ["\u{3b}5", "\u{3e}6", "\u{3c}7", "\u{3f}8"]);
}

#[test]
fn shipped_components_are_forwarded() {
    let corpus = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/policies/corpus");
    let mut seen = 0;
    for version in ["0.1.0"] {
        for file in std::fs::read_dir(corpus.join(version)).unwrap() {
            let path = file.unwrap().path();
            let short = shortened(&std::fs::read(&path).unwrap());
            assert!(is_valid(&short.expect("forwarded")), "{}", path.display());
            seen += 1;
        }
    }
    assert!(seen >= 3, "{seen} components");
}

/// Everything that counts what is moved, behind what moves it: options of lifts, an instance of
/// exports, an argument, an alias of an instance, and one section with a lift that is forwarded and one that is not.
#[test]
fn what_stands_behind_is_counted_anew() {
    let whole = wat::parse_str(
        r#"(component
            (core module $code
                (memory (export "memory") 1)
                (global $posts (mut i32) (i32.const 0))
                (func (export "x#decide") (param i32) (result i32)
                    (i32.add (local.get 0) (global.get $posts)))
                (func (export "inner") (param i32) (result i32) (i32.add (local.get 0) (i32.const 1000)))
                (func (export "other") (param i32) (result i32) (i32.const 7))
                (func (export "realloc-0") (param i32 i32 i32 i32) (result i32) (i32.const 256))
                (func (export "realloc") (param i32 i32 i32 i32) (result i32) (i32.const 128))
                (func (export "post-0") (param i32) (global.set $posts (i32.const -1)))
                (func (export "post") (param i32)
                    (global.set $posts (i32.add (global.get $posts) (i32.const 10))))
                (func (export "echo") (param i32 i32) (result i32)
                    (i32.store (i32.const 0) (local.get 0))
                    (i32.store (i32.const 4) (local.get 1))
                    (i32.store8 (local.get 0) (i32.add (i32.const 65) (i32.div_u (local.get 0) (i32.const 100))))
                    (i32.const 0)))
            (core instance $main (instantiate $code))
            (func $lifted-decide (param "a" u32) (result u32) (canon lift (core func $main "x#decide")))
            (core module $second
                (import "e" "k" (func $k (param i32) (result i32)))
                (func (export "x#completed") (param i32) (result i32)
                    (i32.add (i32.const 5) (call $k (local.get 0)))))
            (alias core export $main "other" (core func $other))
            (alias core export $main "inner" (core func $inner))
            (core instance $env (export "k" (func $inner)))
            (core instance $not-env (export "k" (func $other)))
            (core instance $behind (instantiate $second (with "e" (instance $env))))
            (alias core export $main "memory" (core memory $memory))
            (alias core export $main "realloc-0" (core func $realloc-0))
            (alias core export $main "realloc" (core func $realloc))
            (alias core export $main "post-0" (core func $post-0))
            (alias core export $main "post" (core func $post))
            (alias core export $main "echo" (core func $echo))
            (alias core export $behind "x#completed" (core func $event))
            (type $text (func (param "a" string) (result string)))
            (type $number (func (param "a" u32) (result u32)))
            (func $lifted-echo (type $text)
                (canon lift (core func $echo) (memory $memory) (realloc $realloc) (post-return $post)))
            (func $lifted-event (type $number) (canon lift (core func $event)))
            (export "decide" (func $lifted-decide))
            (export "echo" (func $lifted-echo))
            (export "event" (func $lifted-event)))"#,
    )
    .unwrap();
    let answers = |bytes: &[u8]| {
        let engine = Engine::default();
        let component = Component::new(&engine, bytes).unwrap();
        let mut store = Store::new(&engine, ());
        let instance = Linker::new(&engine).instantiate(&mut store, &component).unwrap();
        let echo = instance.get_typed_func::<(&str,), (String,)>(&mut store, "echo").unwrap();
        let said = echo.call(&mut store, ("abc",)).unwrap().0;
        let numbers = ["decide", "event"].map(|name| {
            let f = instance.get_typed_func::<(u32,), (u32,)>(&mut store, name).unwrap();
            f.call(&mut store, (1,)).unwrap().0
        });
        (said, numbers)
    };
    assert_eq!(answers(&whole), ("Bbc".into(), [11, 1006]));
    assert_eq!(answers(&shortened(&whole).unwrap()), ("Bbc".into(), [11, 1006]));
}

#[test]
fn nobody_gets_any_number_of_modules() {
    let lift = |i: u32| {
        format!(
            r#"(func $f{i} (param "a" u32) (param "b" u64) (result string)
                (canon lift (core func $decide) (memory $memory) (realloc $realloc)))"#
        )
    };
    // `component` has two of its own.
    let lifts = |n: u32| component(&(0..n).map(lift).collect::<String>());
    assert!(shortened(&lifts(FORWARDED_MAX - 2)).is_some());
    assert_eq!(shortened(&lifts(FORWARDED_MAX - 1)), None);
    let instances = |n: u32| {
        component(&format!(
            "(core module $e) {}",
            "(core instance (instantiate $e))".repeat(n as usize)
        ))
    };
    assert!(shortened(&instances(INSTANTIATED_MAX - 1)).is_some());
    assert_eq!(shortened(&instances(INSTANTIATED_MAX)), None);
}

/// One that has as many instances as there may be, most of them in a component within: the two that the shorter way
/// adds are too many.
#[test]
fn what_does_not_fit_with_the_shorter_way_is_loaded_without() {
    let corpus = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/policies/corpus");
    let fifo = std::fs::read(corpus.join("0.1.0/fifo.wasm")).unwrap();
    let own = Parser::new(0).parse_all(&fifo).filter_map(Result::ok);
    let own = own.map(|payload| match payload {
        Payload::InstanceSection(all) => {
            all.into_iter().filter(|i| matches!(i, Ok(Instance::Instantiate { .. }))).count()
        }
        _ => 0,
    });
    let own: usize = own.sum();
    let with = |within: usize| {
        let inner = wat::parse_str(format!(
            "(component (core module $e) {})",
            "(core instance (instantiate $e))".repeat(within)
        ));
        let mut bytes = fifo.clone();
        let mut append = |id: u8, data: &[u8]| {
            let section = enc::RawSection { id, data };
            bytes.push(id);
            enc::Encode::encode(&section, &mut bytes);
        };
        append(4, &inner.unwrap());
        // One instance, of the component that was put behind the others.
        let components = Parser::new(0).parse_all(&fifo);
        let (mut depth, mut index) = (0_u32, 0_u8);
        for payload in components.map(Result::unwrap) {
            match payload {
                Payload::ComponentSection { .. } => {
                    index += u8::from(depth == 0);
                    depth += 1;
                }
                Payload::ModuleSection { .. } => depth += 1,
                Payload::End(_) => depth = depth.saturating_sub(1),
                _ => {}
            }
        }
        append(5, &[1, 0, index, 0]);
        bytes
    };
    let mut pool = PoolingAllocationConfig::new();
    pool.max_core_instances_per_component(64);
    let mut config = crate::settings();
    config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    let engine = Engine::new(&config).unwrap();
    let limits = crate::CompileLimits { memory_bytes: 0, cpu_s: 0, output_bytes: 0 };
    let load = |bytes: &[u8]| {
        let never = crate::Cancel::never();
        crate::Compiler::in_process().compile(&engine, bytes, limits, &never)
    };
    let most = 64 - own;
    assert!(shortened(&with(most)).is_some(), "it is tried");
    load(&with(most)).unwrap();
    let refused = load(&with(most + 1)).map(drop).unwrap_err();
    assert!(matches!(refused, crate::CompileError::Unfit(_)), "{refused}");
}

#[test]
fn what_could_refer_to_what_is_moved_is_left_as_it_is() {
    for more in [
        // Core items by their numbers, from places that are not rewritten.
        r#"(component (alias outer 1 $code (core module $m)) (core instance (instantiate $m)))"#,
        r#"(export "code" (core module $code))"#,
        r#"(import "other" (core module))"#,
        r#"(type (resource (rep i32) (dtor (core func $post))))"#,
        r#"(instance (export "code" (core module $code)))"#,
    ] {
        let whole = component(more);
        assert!(is_valid(&whole), "{more}");
        assert_eq!(shortened(&whole), None, "{more}");
    }
    // And these are none of those.
    let more = r#"(component $c (core module)) (instance (instantiate $c))
        (core module $late) (core instance $late (instantiate $late))
        (core instance (export "f" (func $last)))
        (alias core export $main "x#last" (core func $again))
        (func (export "again") (param "a" u32) (param "b" u64) (result string)
            (canon lift (core func $again) (memory $memory) (realloc $realloc)))"#;
    assert!(is_valid(&shortened(&component(more)).unwrap()));
}

#[test]
fn what_is_no_component_is_left_as_it_is() {
    for bytes in [b"".as_slice(), b"\0asm", b"\0asm\x01\0\0\0", &component("")[..200]] {
        assert_eq!(shortened(bytes), None);
    }
    // Nothing to lead.
    assert_eq!(shortened(&wat::parse_str("(component)").unwrap()), None);
}

proptest! {
    /// Whatever the bytes: no panic, and nothing valid becomes invalid.
    #[test]
    fn changed_bytes_are_left_or_stay_valid(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)
    ) {
        let mut bytes = component("");
        for (at, to) in changes {
            let at = at.index(bytes.len());
            bytes[at] = to;
        }
        if let Some(short) = shortened(&bytes) {
            prop_assert!(is_valid(&short) || !is_valid(&bytes));
        }
    }
}
