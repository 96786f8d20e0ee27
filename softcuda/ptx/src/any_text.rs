//! Any text is read or refused: nothing panics, what is found lies within the text, and the work is linear in it.

mod marks;

use crate::{Item, Statement, Token, inside, lex, number, parameters, parse, statements, work};
use marks::MARKS;
use proptest::prelude::*;

const WORDS: [&str; 33] = [
    ".version 8.0\n",
    ".target sm_90\n",
    ".address_size 64\n",
    ".entry k",
    ".func f",
    ".func (.reg .b32 r) g",
    "(.param .u64 p, .param .align 8 .b8 q[48])",
    "()",
    ".visible ",
    ".extern ",
    ".global .u32 a",
    ".shared .b8 s[]",
    " = {1, -2}",
    " = generic(a)",
    ".align 16",
    ".v4 .f32 x",
    ".ptr .global",
    ".maxntid 32, 1",
    ".pragma \"n\";",
    ".alias a, b;",
    ".section .d {",
    "@@DWARF x\n",
    ".loc 1 2 3\n",
    "# 1 \"x\"\n",
    "L:",
    "@!%p1 ",
    "@%p ",
    "bra L;",
    "mov.u32 %r1, %ctaid.x;",
    "ld.global.L2::128B.u32 %r1, [%rd1+4];",
    "call (%r1), f, (%r2);",
    "ret;",
    "1.5e-3",
];

fn place(source: &str, token: &Token) -> std::ops::Range<usize> {
    let text = token.text(source);
    let range = token.start as usize..token.end() as usize;
    assert_eq!(source.get(range.clone()), Some(text));
    assert!(!text.is_empty());
    range
}

/// Reads all there is to read.
fn read(source: &str) {
    let Ok(tokens) = lex(source) else { return };
    let (mut end, mut lines) = (0, 1);
    for token in &tokens {
        let range = place(source, token);
        lines += source[end..range.start].matches('\n').count();
        assert!(range.start >= end && token.line as usize == lines);
        end = range.end;
        let _ = number(token.text(source));
    }
    let _ = statements(source, &tokens).count();
    let Ok(module) = parse(source, &tokens) else { return };
    for item in module.items.flatten() {
        match item {
            Item::Alias { .. } | Item::Target(_) | Item::AddressSize(_) => {}
            Item::Variable(_, declaration) => drop(declaration.layout()),
            Item::Function(function) => {
                for list in [function.results, function.parameters].into_iter().flatten() {
                    for parameter in parameters(source, list).flatten() {
                        let _ = parameter.layout();
                    }
                }
                let Some(body) = function.body else { continue };
                let (mut opened, mut closed) = (0, 0);
                for statement in statements(source, inside(body)) {
                    match statement {
                        Ok(Statement::Open) => opened += 1,
                        Ok(Statement::Close) => closed += 1,
                        _ => {}
                    }
                    assert!(opened + closed <= body.len());
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let text = String::from_utf8_lossy(&bytes);
        read(&text);
        read(&format!(".version 8.0\n{text}"));
        read(&format!(".version 8.0\n.entry k() {{ {text} }}"));
    }

    #[test]
    fn any_words(
        words in prop::collection::vec((prop::sample::select([&WORDS[..], &MARKS].concat()), any::<bool>()), 0..40),
        is_body in any::<bool>(),
    ) {
        let mut text = ".version 8.0\n.target sm_90\n".to_owned();
        if is_body {
            text += ".visible .entry k() {\n";
        }
        for (word, spaced) in words {
            text += word;
            text += if spaced { " " } else { "" };
        }
        if is_body {
            text += "}";
        }
        read(&text);
    }
}

#[test]
fn work_is_linear_in_the_text() {
    /// Bytes and tokens looked at for each byte of the text.
    const WORK_PER_BYTE_MAX: u64 = 20;
    for piece in
        ["{", "(", "@", "@@", ".", "::", "\"\"", "1e", "/*", ".u32 a[", "a:", ".loc\n", "é"]
    {
        let many = piece.repeat(100_000 / piece.len());
        for text in [
            many.clone(),
            format!(".version 8.0\n{many}"),
            format!(".version 8.0\n.entry k() {{ {many} }}"),
            format!(".version 8.0\n.entry k({many}) {{}}"),
            format!(".version 8.0\n.global .u32 a = {many};"),
        ] {
            let done = work::counted(|| read(&text));
            let at_most = WORK_PER_BYTE_MAX * text.len() as u64;
            assert!((text.len() as u64 / 2..=at_most).contains(&done), "{piece}: {done}");
        }
    }
}
