//! Kernels made at random: integer arithmetic over the indices of blocks and threads,
//! branches, loops, shared memory with barriers, and results by store and by atomic.

use crate::common::{Arg, Case};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use std::fmt::Write;

/// Registers that statements read and write: `%r0` to `%r7`.
const REGISTERS: u8 = 8;

#[derive(Clone, Debug)]
enum Statement {
    /// Destination, operation, two sources.
    Compute(u8, u8, u8, u8),
    /// Destination from a special register.
    Index(u8, u8),
    Constant(u8, u32),
    /// Those threads whose two registers compare.
    If(u8, u8, u8, Vec<Statement>, Vec<Statement>),
    /// As many times as a register's low bits say.
    Loop(u8, Vec<Statement>),
    /// Through shared memory: every thread gives one register and takes a neighbour's.
    Exchange(u8, u8, u32),
    /// From a lane below.
    Shuffle(u8, u8, u32),
}

const OPERATIONS: [&str; 11] = [
    "add.u32",
    "sub.s32",
    "mul.lo.u32",
    "xor.b32",
    "and.b32",
    "or.b32",
    "min.u32",
    "max.s32",
    "shl.b32",
    "mul.hi.u32",
    "div.u32",
];
const INDICES: [&str; 12] = [
    "%ctaid.x",
    "%ctaid.y",
    "%ctaid.z",
    "%nctaid.x",
    "%nctaid.y",
    "%nctaid.z",
    "%tid.x",
    "%tid.y",
    "%tid.z",
    "%ntid.x",
    "%laneid",
    "%ctaid.x",
];
const COMPARISONS: [&str; 6] = ["eq.u32", "ne.s32", "lt.u32", "ge.s32", "gt.u32", "le.s32"];

fn simple() -> BoxedStrategy<Statement> {
    let r = 0..REGISTERS;
    prop_oneof![
        4 => (r.clone(), 0..OPERATIONS.len() as u8, r.clone(), r.clone())
            .prop_map(|(d, o, a, b)| Statement::Compute(d, o, a, b)),
        2 => (r.clone(), 0..INDICES.len() as u8).prop_map(|(d, i)| Statement::Index(d, i)),
        1 => (r, any::<u32>()).prop_map(|(d, v)| Statement::Constant(d, v)),
    ]
    .boxed()
}

/// Statements that threads may do apart from one another.
fn apart() -> BoxedStrategy<Vec<Statement>> {
    let r = || 0..REGISTERS;
    let nested = simple().prop_recursive(3, 24, 4, move |inner| {
        prop_oneof![
            (
                0..COMPARISONS.len() as u8,
                r(),
                r(),
                prop::collection::vec(inner.clone(), 1..4),
                prop::collection::vec(inner.clone(), 0..3)
            )
                .prop_map(|(c, a, b, yes, no)| Statement::If(c, a, b, yes, no)),
            (r(), prop::collection::vec(inner, 1..4))
                .prop_map(|(a, body)| Statement::Loop(a, body)),
        ]
    });
    prop::collection::vec(nested, 1..6).boxed()
}

fn body() -> impl Strategy<Value = Vec<Statement>> {
    let r = || 0..REGISTERS;
    let together = prop_oneof![
        (r(), r(), 0..64u32).prop_map(|(d, s, k)| Statement::Exchange(d, s, k)),
        (r(), r(), 0..32u32).prop_map(|(d, s, k)| Statement::Shuffle(d, s, k)),
    ];
    let section = (apart(), together).prop_map(|(mut statements, last)| {
        statements.push(last);
        statements
    });
    prop::collection::vec(section, 1..4).prop_map(|sections| sections.concat())
}

fn shape() -> impl Strategy<Value = ([u32; 3], [u32; 3])> {
    let grid = prop_oneof![
        (1..14u32).prop_map(|x| [x, 1, 1]),
        (1..5u32, 1..5u32).prop_map(|(x, y)| [x, y, 1]),
        (1..4u32, 1..3u32, 1..4u32).prop_map(|(x, y, z)| [x, y, z]),
    ];
    let block = prop_oneof![
        (1..100u32).prop_map(|x| [x, 1, 1]),
        (1..9u32, 1..9u32).prop_map(|(x, y)| [x, y, 1]),
        (1..5u32, 1..4u32, 1..4u32).prop_map(|(x, y, z)| [x, y, z]),
    ];
    (grid, block)
}

struct Writer {
    text: String,
    labels: usize,
}

impl Writer {
    fn line(&mut self, line: &str) {
        self.text.push('\t');
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn all(&mut self, statements: &[Statement], depth: usize) {
        for statement in statements {
            self.one(statement, depth);
        }
    }

    fn one(&mut self, statement: &Statement, depth: usize) {
        self.labels += 1;
        let label = self.labels;
        match statement {
            Statement::Compute(d, o, a, b) => {
                let op = OPERATIONS[*o as usize];
                if op == "div.u32" {
                    self.line(&format!("or.b32 %r8, %r{b}, 1;"));
                    self.line(&format!("div.u32 %r{d}, %r{a}, %r8;"));
                } else {
                    self.line(&format!("{op} %r{d}, %r{a}, %r{b};"));
                }
            }
            Statement::Index(d, i) => {
                self.line(&format!("mov.u32 %r{d}, {};", INDICES[*i as usize]));
            }
            Statement::Constant(d, v) => self.line(&format!("mov.u32 %r{d}, {v};")),
            Statement::If(c, a, b, yes, no) => {
                let compare = COMPARISONS[*c as usize];
                self.line(&format!("setp.{compare} %p0, %r{a}, %r{b};"));
                self.line(&format!("@!%p0 bra $else{label};"));
                self.all(yes, depth);
                self.line(&format!("bra $end{label};"));
                let _ = writeln!(self.text, "$else{label}:");
                self.all(no, depth);
                let _ = writeln!(self.text, "$end{label}:");
            }
            Statement::Loop(a, body) => {
                let count = 20 + depth;
                self.line(&format!("and.b32 %r{count}, %r{a}, 3;"));
                let _ = writeln!(self.text, "$loop{label}:");
                self.all(body, depth + 1);
                self.line(&format!("add.u32 %r{count}, %r{count}, -1;"));
                self.line(&format!("setp.gt.s32 %p0, %r{count}, 0;"));
                self.line(&format!("@%p0 bra $loop{label};"));
            }
            Statement::Exchange(d, s, k) => {
                self.line(&format!("st.shared.u32 [%r10], %r{s};"));
                self.line("bar.sync 0;");
                self.line(&format!("add.u32 %r8, %r9, {k};"));
                self.line("rem.u32 %r8, %r8, %r11;");
                self.line("mad.lo.u32 %r8, %r8, 4, %r12;");
                self.line(&format!("ld.shared.u32 %r{d}, [%r8];"));
                self.line("bar.sync 0;");
            }
            Statement::Shuffle(d, s, k) => {
                // Upwards, so that no lane reads one that the last warp lacks.
                self.line(&format!("shfl.sync.up.b32 %r{d}, %r{s}, {k}, 0, -1;"));
            }
        }
    }
}

fn case(statements: &[Statement], grid: [u32; 3], block: [u32; 3]) -> Case {
    let mut w = Writer { text: String::new(), labels: 0 };
    w.text.push_str(
        ".version 7.0\n.target sm_80\n.address_size 64\n\
         .visible .entry k(.param .u64 out, .param .u64 sum)\n{\n\
         \t.reg .pred %p<4>;\n\t.reg .b32 %r<40>;\n\t.reg .b64 %rd<8>;\n\
         \t.shared .align 4 .b8 all[4096];\n\
         \tmov.u32 %r13, %tid.x;\n\tmov.u32 %r14, %tid.y;\n\tmov.u32 %r15, %tid.z;\n\
         \tmov.u32 %r16, %ntid.x;\n\tmov.u32 %r17, %ntid.y;\n\tmov.u32 %r18, %ntid.z;\n\
         \tmad.lo.u32 %r9, %r15, %r17, %r14;\n\tmad.lo.u32 %r9, %r9, %r16, %r13;\n\
         \tmul.lo.u32 %r11, %r16, %r17;\n\tmul.lo.u32 %r11, %r11, %r18;\n\
         \tmov.u32 %r12, all;\n\tmad.lo.u32 %r10, %r9, 4, %r12;\n",
    );
    for r in 0..REGISTERS {
        w.line(&format!("mov.u32 %r{r}, {};", INDICES[usize::from(r)]));
    }
    w.all(statements, 0);
    w.text.push_str(
        "\tmov.u32 %r13, %ctaid.z;\n\tmov.u32 %r14, %nctaid.y;\n\tmov.u32 %r15, %ctaid.y;\n\
         \tmad.lo.u32 %r13, %r13, %r14, %r15;\n\tmov.u32 %r14, %nctaid.x;\n\
         \tmov.u32 %r15, %ctaid.x;\n\tmad.lo.u32 %r13, %r13, %r14, %r15;\n\
         \tmad.lo.u32 %r13, %r13, %r11, %r9;\n\
         \tld.param.u64 %rd0, [out];\n\tmul.wide.u32 %rd1, %r13, 4;\n\tadd.u64 %rd0, %rd0, %rd1;\n",
    );
    for r in 0..REGISTERS {
        w.line(&format!("red.global.add.u32 [%rd0], %r{r};"));
        w.line(&format!("mul.lo.u32 %r{r}, %r{r}, 3;"));
    }
    w.line("ld.param.u64 %rd2, [sum];");
    w.line("red.global.add.u32 [%rd2], %r0;");
    w.line("red.global.xor.b32 [%rd2+4], %r1;");
    w.line("red.global.max.u32 [%rd2+8], %r2;");
    w.text.push_str("\tret;\n}\n");
    let threads: u32 = grid.iter().chain(&block).product();
    Case {
        source: w.text,
        kernel: "k".into(),
        grid,
        block,
        shared: 0,
        args: vec![Arg::Buffer(threads as usize), Arg::Buffer(3)],
        prelude_only: false,
        refused: false,
    }
}

/// Makes `n` kernels, the same ones every time.
pub fn each(n: usize, mut check: impl FnMut(usize, Case)) {
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let strategy = (body(), shape());
    for i in 0..n {
        let (statements, (grid, block)) = strategy.new_tree(&mut runner).unwrap().current();
        check(i, case(&statements, grid, block));
    }
}
