//! What the PTX rewriter changes, what it refuses, and that it owns only its edits.
#![allow(missing_docs)]

mod common;

use TransformRefusal::*;
use tally_rewriter::ptx;
use tally_rewriter::{KernelForm, Rewritten, TransformRefusal};

const HEAD: &str = ".version 8.0\n.target sm_90\n.address_size 64\n";
const FORMS: [KernelForm; 2] = [KernelForm::ByClaims, KernelForm::ByOffset];

fn transformed(text: &str, form: KernelForm) -> Rewritten {
    ptx::rewrite(text, form, None).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// Kernel `k` in a module of `rest`.
fn both(rest: &str) -> [Result<(), TransformRefusal>; 2] {
    let text = format!("{HEAD}{rest}");
    FORMS.map(|form| {
        let transformed = ptx::rewrite(&text, form, None)?;
        transformed.kernel("k").map(|_| ())
    })
}

fn body(statements: &str) -> [Result<(), TransformRefusal>; 2] {
    both(&format!(
        ".entry k(.param .u64 p) {{ .reg .b32 %r<9>; .reg .b64 %rd<9>; {statements} ret; }}"
    ))
}

#[test]
fn kernels_that_read_their_sm_say_so() {
    for (statements, reads_sm) in common::READS_SM {
        for form in FORMS {
            let text = format!("{HEAD}{}", common::waits(statements));
            assert_eq!(
                transformed(&text, form).kernel("k").unwrap().reads_sm,
                reads_sm,
                "{statements}"
            );
        }
    }
}

#[test]
fn kernels_whose_blocks_may_wait_for_one_another_say_so() {
    for (statements, may_wait) in common::WAITS {
        for form in FORMS {
            let text = format!("{HEAD}{}", common::waits(statements));
            assert_eq!(
                transformed(&text, form).kernel("k").unwrap().may_wait,
                may_wait,
                "{statements}"
            );
        }
    }
    // What a function gives back is named in its head.
    let adds = ".func (.reg .u32 got) f(.reg .u64 q) { atom.global.add.u32 got, [q], 1; ret; }";
    let text = format!("{HEAD}{adds} {}", common::waits("call (%r1), f, (%rd1);"));
    assert!(transformed(&text, KernelForm::ByClaims).kernel("k").unwrap().may_wait);
    // What a function does that is called, and what a call by a register may do, count as its own.
    let waiting = ".func f(.param .u64 q) { .reg .b64 %rd<2>; .reg .b32 %r<2>; ld.param.u64 %rd1, [q]; \
         ld.acquire.gpu.u32 %r1, [%rd1]; ret; }";
    let calls = "{ .param .u64 a; st.param.u64 [a], %rd1; call f, (a); }";
    let named = "{ .param .u64 a; st.param.u64 [a], %rd1; call %rd1, (a), proto; }";
    for statements in ["", calls, &format!("proto: .callprototype _ (.param .u64 _); {named}")] {
        let text = format!("{HEAD}{waiting} {}", common::waits(statements));
        let transformed = transformed(&text, KernelForm::ByClaims);
        assert_eq!(
            transformed.kernel("k").unwrap().may_wait,
            !statements.is_empty(),
            "{statements}"
        );
    }
}

#[test]
fn taking_the_edits_away_gives_the_source_back() {
    for (name, source) in common::files() {
        for form in FORMS {
            let plan = ptx::plan(&source, form, None).unwrap();
            let edits = plan.edits.clone();
            let transformed = plan.apply(&source);
            let text = std::str::from_utf8(&transformed.image).unwrap();
            assert!(transformed.kernels.is_empty() || text.len() > source.len());
            assert_eq!(ptx::undo(&source, text, &edits).as_deref(), Some(&*source), "{name}");
        }
    }
}

#[test]
fn what_was_rewritten_is_not_rewritten_again() {
    for (name, source) in common::files() {
        for form in FORMS {
            let once = ptx::rewrite(&source, form, None).unwrap();
            let text = std::str::from_utf8(&once.image).unwrap();
            let names: Vec<&str> = once.kernels.iter().map(|k| k.name.as_str()).collect();
            let twice = ptx::rewrite(text, form, Some(&names)).unwrap();
            assert_eq!(twice.kernels, [], "{name}");
            assert_eq!(twice.refused.len(), names.len());
            assert!(twice.refused.iter().all(|(_, why)| *why == Metadata), "{name}");
            assert_eq!(twice.image, once.image);
        }
    }
}

#[test]
fn the_control_block_comes_after_every_parameter() {
    let of = |list: &str| {
        let text = format!("{HEAD}.visible .entry k{list} .maxntid 32, 1, 1 {{ ret; }}");
        let transformed = transformed(&text, KernelForm::ByClaims);
        let kernel = transformed.kernel("k").unwrap().clone();
        let image = String::from_utf8(transformed.image).unwrap();
        assert!(image.contains(".param .align 8 .b8 k_param_tally[56]"), "{image}");
        (kernel.parameter_count, kernel.control_offset)
    };
    assert_eq!(of(""), (0, 0));
    assert_eq!(of("()"), (0, 0));
    assert_eq!(of("( // no ) here\n )"), (0, 0));
    assert_eq!(of("(.param .u8 a)"), (1, 8));
    assert_eq!(of("(.param .u64 .ptr .global .align 16 a, .param .u32 b // last\n)"), (2, 16));
    assert_eq!(of("(.param .u32 a, .param .align 64 .b8 m[130])"), (2, 200));
    assert_eq!(of("(.param .u64 a, .param .align 8 .b8 m[4032])"), (2, 4040));
}

#[test]
fn parameters_that_leave_no_room_are_refused() {
    let of = |version: &str, target: &str, bytes: u32| {
        let text = format!(
            ".version {version}\n.target {target}\n.address_size 64\n\
             .entry k(.param .align 8 .b8 m[{bytes}]) {{ ret; }}"
        );
        transformed(&text, KernelForm::ByClaims).kernel("k").map(|k| k.control_offset)
    };
    assert_eq!(of("8.0", "sm_90", 4040), Ok(4040));
    assert_eq!(of("8.0", "sm_90", 4041), Err(ParameterSpace));
    assert_eq!(of("8.1", "sm_90", 4041), Ok(4048));
    assert_eq!(of("8.1", "sm_60", 4041), Err(ParameterSpace));
    assert_eq!(of("8.1", "sm_90", 32_704), Ok(32_704));
    assert_eq!(of("8.1", "sm_90", 32_712), Err(ParameterSpace));
    assert_eq!(both(".entry k(.param .texref t) { ret; }"), [Err(Metadata); 2]);
}

#[test]
fn versions_are_raised_where_they_can_be() {
    let of = |head: &str| {
        let text = format!("{head} .entry k() {{ ret; }}");
        ptx::rewrite(&text, KernelForm::ByClaims, None)
            .map(|transformed| String::from_utf8(transformed.image).unwrap())
    };
    let raised = of(".version 4.2 .target sm_35 .address_size 64").unwrap();
    assert!(raised.starts_with(".version 6.0 .target sm_35"), "{raised}");
    assert!(raised.contains("ld.volatile.global") && !raised.contains(".relaxed"));
    let kept = of(".version 8.7 .target sm_90a .address_size 64").unwrap();
    assert!(kept.starts_with(".version 8.7"));
    assert!(kept.contains("atom.relaxed.gpu.global.cas") && !kept.contains("volatile"));
    for head in [
        ".version 8.0 .target sm_90 .address_size 32",
        ".version 2.3 .target sm_20 .address_size 64",
        ".version 3.1 .target sm_20 .address_size 64",
    ] {
        assert_eq!(of(head), Err(PtxVersion), "{head}");
    }
}

#[test]
fn only_what_is_asked_for_is_touched() {
    let text = format!("{HEAD}.entry a() {{ ret; }}\n.entry b() {{ ret; }}\n.entry c();\n");
    let transformed = ptx::rewrite(&text, KernelForm::ByClaims, Some(&["b", "nobody"])).unwrap();
    let names: Vec<_> = transformed.kernels.iter().map(|k| k.name.as_str()).collect();
    assert_eq!((names, transformed.refused.len()), (vec!["b"], 0));
    assert_eq!(transformed.kernel("nobody"), Err(NoSuchKernel));
    let image = String::from_utf8(transformed.image).unwrap();
    assert!(image.contains(".entry a() { ret; }") && image.contains(".entry c();"));
    let none = ptx::rewrite(&text, KernelForm::ByClaims, Some(&[])).unwrap();
    assert_eq!(none.image, text.as_bytes());
}

#[test]
fn declarations_get_the_parameter_too() {
    let text = format!("{HEAD}.entry k(.param .u64 p);\n.entry k(.param .u64 p) {{ ret; }}");
    let image = String::from_utf8(transformed(&text, KernelForm::ByClaims).image).unwrap();
    assert_eq!(image.matches("k_param_tally[56]").count(), 2, "{image}");
}

#[test]
fn kernels_are_refused_for_what_they_do() {
    use TransformRefusal::ProgrammaticDependence as Dependence;
    for (statements, why) in [
        ("mov.b32 %r1, %envreg2;", GridSync),
        ("griddepcontrol.wait;", Dependence),
        ("@%p griddepcontrol.launch_dependents;", Dependence),
        ("clusterlaunchcontrol.try_cancel.async.b128 [%r1], [%r2];", LaunchForm),
        (".global .u32 calls; red.global.add.u32 [calls], 1;", WritableGlobals),
    ] {
        assert_eq!(body(statements), [Err(why); 2], "{statements}");
    }
    // The same words in comments, names and labels are harmless.
    assert_eq!(body("// griddepcontrol %envreg1\n $griddepcontrol: /* %ctaid */"), [Ok(()); 2]);
    assert_eq!(body("barrier.cluster.arrive; barrier.cluster.wait;"), [Ok(()); 2]);
}

#[test]
fn what_functions_do_counts_for_those_that_reach_them() {
    let module = |called: &str, first: &str| {
        both(&format!(
            ".func leaf() {{ .reg .b32 %r<3>; {called} ret; }}\n\
             .func apart() {{ .reg .b32 %r<3>; mov.b32 %r1, %envreg1; ret; }}\n\
             .func middle();\n\
             .func other() {{ call middle, (); ret; }}\n\
             .func middle() {{ call leaf, (); call other, (); ret; }}\n\
             .entry k() {{ .reg .b64 %rd<3>; {first} ret; }}"
        ))
    };
    assert_eq!(module("", "call.uni middle, ();"), [Ok(()); 2]);
    let index = "mov.u32 %r1, %nctaid.y;";
    assert_eq!(module(index, "call.uni other, ();"), [Ok(()), Err(IndexInFunction)]);
    assert_eq!(module(index, ""), [Ok(()); 2]);
    assert_eq!(module("mov.b32 %r1, %envreg2;", "call middle, ();"), [Err(GridSync); 2]);
    assert_eq!(module("griddepcontrol.wait;", "call other, ();"), [Err(ProgrammaticDependence); 2]);
    // A register may hold the address of any function whose address is taken.
    assert_eq!(module("", "call %rd1, (), proto;"), [Ok(()); 2]);
    assert_eq!(module("", "mov.u64 %rd1, apart; call %rd1, (), proto;"), [Err(GridSync); 2]);
    assert_eq!(module("mov.u64 %rd1, apart;", "call %rd1, (), proto;"), [Err(GridSync); 2]);
    let table = ".global .u64 t[1] = {f};\n.func f() { griddepcontrol.wait; ret; }\n\
        .entry k() { call %rd1, (), proto; ret; }";
    assert_eq!(both(table), [Err(ProgrammaticDependence); 2]);
    assert_eq!(
        both(".extern .func far();\n.entry k() { call far, (); ret; }"),
        [Err(Relocatable); 2]
    );
    assert_eq!(
        both(".func a() {ret;}\n.func b();\n.alias b, a;\n.entry k() { call b, (); ret; }"),
        [Ok(()); 2]
    );
}

#[test]
fn clusters_are_transformed_whole_or_not_at_all() {
    let of = |directive: &str, statements: &str| {
        let text = format!("{HEAD}.entry k() {directive} {{ .reg .b32 %r<9>; {statements} ret; }}");
        FORMS.map(|form| transformed(&text, form).kernel("k").map(|k| k.cluster))
    };
    assert_eq!(of(".reqnctapercluster 4, 2", ""), [Ok(Some([4, 2, 1])), Err(ClusterShape)]);
    assert_eq!(
        of(".explicitcluster .reqnctapercluster 1", ""),
        [Ok(Some([1; 3])), Err(ClusterShape)]
    );
    assert_eq!(of(".reqnctapercluster 3", ""), [Err(ClusterShape); 2]);
    assert_eq!(of(".reqnctapercluster 0, 1, 1", ""), [Err(ClusterShape); 2]);
    assert_eq!(of(".maxclusterrank 8", ""), [Ok(None), Err(ClusterShape)]);
    assert_eq!(of(".blocksareclusters .reqntid 32", ""), [Err(ClusterShape); 2]);
    assert_eq!(of("", "mov.u32 %r1, %cluster_ctaid.x;"), [Ok(None), Err(ClusterShape)]);
    assert_eq!(of("", "mov.u32 %r1, %clusterid.x;"), [Ok(None), Err(ClusterShape)]);
    assert_eq!(of("", "mov.u64 %r1, %gridid;"), [Err(LaunchForm); 2]);
    assert_eq!(of("", "mov.u64 %r1, %current_graph_exec;"), [Err(LaunchForm); 2]);
}

#[test]
fn every_read_of_the_index_is_replaced_in_the_form_by_offset() {
    let statements = "mov.u32 %r1, %ctaid.x; @!%p cvt.s64.s32 %rd1, %nctaid.z; \
        mov.b32 %r1, %ctaid.y; mov.v4.u32 {%r1, %r2, %r3, %r4}, %nctaid;";
    let text = format!("{HEAD}.entry k() {{ {statements} ret; }}");
    let transformed = transformed(&text, KernelForm::ByOffset);
    assert!(transformed.kernel("k").is_ok());
    let image = String::from_utf8(transformed.image).unwrap();
    for want in [
        "mov.u32 %r1, %tally_ctaid_x;",
        "@!%p cvt.s64.s32 %rd1, %tally_nctaid_z;",
        "mov.b32 %r1, %tally_ctaid_y;",
        "mov.v4.u32 {%r1, %r2, %r3, %r4}, {%tally_nctaid_x, %tally_nctaid_y, %tally_nctaid_z, %tally_zero};",
    ] {
        assert!(image.contains(want), "{want}\n{image}");
    }
    assert_eq!(image.matches("%ctaid").count(), 1, "the prologue's own");
    for odd in [
        "mov.u16 %rs1, %ctaid.x;",
        "cvt.u32.u16 %r1, %nctaid.y;",
        "mov.u32 %r1, %ctaid.w;",
        "mov.u32 %r1, %ctaid;",
    ] {
        assert_eq!(body(odd), [Ok(()), Err(PtxVersion)], "{odd}");
    }
}

#[test]
fn names_of_the_program_are_never_used() {
    let text = format!(
        "{HEAD}.entry tally_k(.param .u64 tally_p) {{ .reg .b32 %tally_x; $tally3_own: ret; }}"
    );
    for form in FORMS {
        let image = String::from_utf8(transformed(&text, form).image).unwrap();
        assert!(image.contains("%tally1_"), "{image}");
        assert_eq!(image.matches("%tally_").count(), 1);
        assert_eq!(image.matches("$tally3_own").count(), 1);
    }
}

#[test]
fn launching_from_the_device_and_taking_addresses_are_refused() {
    for name in [
        "cudaLaunchDeviceV2",
        "cudaGetParameterBufferV2",
        "__cudaCDP2LaunchDevice",
        "cudaDeviceSynchronize",
    ] {
        let text = format!(
            "{HEAD}.extern .func (.param .b32 r) {name} (.param .b64 a);\n.entry k() {{ ret; }}"
        );
        for form in FORMS {
            assert_eq!(ptx::rewrite(&text, form, None), Err(DeviceLaunch), "{name}");
        }
    }
    assert_eq!(
        both(
            ".extern .func cudaCGSynchronizeGrid();\n.entry k() { call cudaCGSynchronizeGrid, (); ret; }"
        ),
        [Err(GridSync); 2]
    );
    for rest in [
        ".entry k() { ret; }\n.entry other() { .reg .b64 %rd; mov.u64 %rd, k; ret; }",
        ".entry k() { ret; }\n.func f() { .reg .b64 %rd; mov.u64 %rd, k; ret; }",
        ".entry k();\n.global .u64 table[1] = {k};\n.entry k() { ret; }",
    ] {
        assert_eq!(both(rest), [Err(AddressTaken); 2], "{rest}");
    }
    // Of a function: another kernel may compare it, or call it.
    for [leaf, first] in [["", "mov.u64 %rd, f;"], ["mov.u64 %rd, g;", "call f, ();"]] {
        let text = format!(
            ".func g() {{ ret; }}\n.func f() {{ .reg .b64 %rd; {leaf} ret; }}\n\
             .entry k() {{ .reg .b64 %rd; {first} ret; }}"
        );
        assert_eq!(both(&text), [Err(AddressTaken); 2], "{text}");
    }
}

#[test]
fn variables_are_refused_unless_they_are_text_of_messages() {
    let print = "{ .param .b64 param0; st.param.b64 [param0+0], %rd2; .param .b64 param1; \
        st.param.b64 [param1+0], 0; .param .b32 ret; call.uni (ret), vprintf, (param0, param1); }";
    let with = |var: &str, code: &str| {
        both(&format!(
            ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n{var}\n\
             .func keep(.param .b64 at) {{ ret; }}\n\
             .entry k(.param .u64 p) {{ .reg .b32 %r<9>; .reg .b64 %rd<9>; {code} ret; }}"
        ))
    };
    let text = ".global .align 1 .b8 $str[3] = {104, 105, 0};";
    let take = "mov.u64 %rd1, $str; cvta.global.u64 %rd2, %rd1;";
    let printed = format!("{take} {print}");
    assert_eq!(with(text, &printed), [Ok(()); 2]);
    assert_eq!(with(text, ""), [Ok(()); 2]);
    let asserted =
        (text.replace("$str", "assertMessage_0"), printed.replace("$str", "assertMessage_0"));
    assert_eq!(with(&asserted.0, &asserted.1), [Ok(()); 2]);
    assert_eq!(with(text, &format!("mov.b64 %rd2, $str; {print}")), [Ok(()); 2]);
    for (var, code) in [
        (text, format!("{take} st.global.u64 [%rd3], %rd2; {print}")),
        (text, format!("{take} {print} st.u8 [%rd2], 1;")),
        (text, format!("{take} add.u64 %rd4, %rd1, 1; {print}")),
        (text, print.replace("%rd2", "%rd1").replace("vprintf", "keep") + take),
        (text, "ld.global.u8 %r1, [$str];".into()),
        (text, format!("{take} st.param.b64 [kept], %rd2;")),
        (text, format!("{take} {{ .param .b64 param0; st.param.b64 [param0], %rd2; }}")),
        (text, format!("mov.u64 %rd1, $str+1; {printed}")),
        (".visible .global .align 1 .b8 $str[3] = {104, 105, 0};", printed.clone()),
        (".global .align 1 .b8 $str[3];", printed.clone()),
        (".global .align 1 .b8 _ZL3fmt[3] = {104, 105, 0};", printed.replace("$str", "_ZL3fmt")),
        (".const .align 1 .b8 $str[3] = {104, 105, 0};", printed.clone()),
        (".global .align 8 .u64 $str[1] = {0};", printed.clone()),
        (".global .b8 $str[1] = {0};\n.global .u64 $also = generic($str);", printed.clone()),
        (".extern .global .b8 $str[1];\n.global .b8 $str[1] = {0};", printed.clone()),
    ] {
        assert_eq!(with(var, &code), [Err(WritableGlobals); 2], "{var} {code}");
    }
    // The digits of 2/pi, of every sine; and something that only bears their name.
    let read = "ld.global.u32 %r1, [__cudart_i2opi_f+4];";
    let table = "align 4 .b32 __cudart_i2opi_f[2] = {1011060801, -614296167};";
    assert_eq!(with(&format!(".global .{table}"), read), [Ok(()); 2]);
    for var in [
        format!(".visible .global .{table}"),
        ".global .align 4 .b32 __cudart_i2opi_f[2];".to_owned(),
    ] {
        assert_eq!(with(&var, read), [Err(WritableGlobals); 2], "{var}");
    }
    // Another kernel that writes it makes it writable for all.
    let two = format!(
        "{HEAD}.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n{text}\n\
        .entry k() {{ {printed} ret; }}\n.entry w() {{ st.global.u8 [$str], 1; ret; }}\n.entry free() {{ ret; }}"
    );
    let transformed = transformed(&two, KernelForm::ByClaims);
    assert_eq!(transformed.kernel("k"), Err(WritableGlobals));
    assert_eq!(transformed.kernel("w"), Err(WritableGlobals));
    assert!(transformed.kernel("free").is_ok());
    // Shared memory is no variable of the module.
    assert_eq!(
        both(
            ".extern .shared .align 16 .b8 s[];\n.shared .u32 t;\n.entry k() { st.shared.u32 [t], 1; st.shared.u32 [s], 1; ret; }"
        ),
        [Ok(()); 2]
    );
}

#[test]
fn what_is_not_understood_is_refused() {
    for (text, why) in [
        ("", Malformed),
        ("hello", Malformed),
        (".version 8.0", PtxVersion),
        (".version x.y\n.target sm_90", Malformed),
    ] {
        assert_eq!(ptx::rewrite(text, KernelForm::ByClaims, None).map(|_| ()), Err(why), "{text}");
    }
    for rest in [
        ".entry k( { ret; }",
        ".entry k() { ret;",
        ".entry k() { ret }",
        ".entry k() { ret; } }",
        ".entry k() { ret; } .entry k() { ret; }",
        ".entry k() .newdirective { ret; }",
        ".newdirective 3;",
        ".entry k() { .pragma \"open; }",
        ".entry",
        ".entry {",
        ".global ;",
        ".global .u32 a = {",
        ".func k() { ret; } .entry k() { ret; }",
        "#define X ret\n.entry k() { X; }",
        ".section .debug {",
    ] {
        let text = format!("{HEAD}{rest}");
        let got = ptx::rewrite(&text, KernelForm::ByOffset, None)
            .map(|transformed| String::from_utf8(transformed.image));
        assert_eq!(got, Err(Malformed), "{rest}");
    }
}

#[test]
fn debug_data_and_markers_are_passed_over() {
    let rest = ".file 1 \"C:\\x\\y.cu\", 1, 2\n.entry k() {\n.loc 1 2 0\nret;\n\
        .loc 1 3 7, function_name info, inlined_at 1 20 3\nret; }\n\
        # 7 \"y.cu\"\n@@DWARF .4byte k, 0\n.section .debug_info { .b64 $L__begin; { .b8 1 } }\n";
    assert_eq!(both(rest), [Ok(()); 2]);
}

#[test]
fn work_is_linear_in_the_text() {
    // Many entries and functions that all reach each other, and many strings.
    let n = 3000;
    let mut text = HEAD.to_string();
    for i in 0..n {
        text += &format!(".global .b8 s{i}[1] = {{0}};\n.func f{i}();\n");
    }
    for i in 0..n {
        let next = (i + 1) % n;
        text += &format!(
            ".func f{i}() {{ call f{next}, (); call f0, (); ret; }}\n.entry e{i}() {{ call f{i}, (); ret; }}\n"
        );
    }
    let start = std::time::Instant::now();
    let transformed = transformed(&text, KernelForm::ByOffset);
    assert_eq!(transformed.kernels.len(), n);
    assert!(start.elapsed().as_secs() < 2, "{:?}", start.elapsed());
}
