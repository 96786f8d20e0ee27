//! Cubins that `ptxas` made of the PTX files in `cubins/`, patched and compared.

use std::collections::HashMap;
use tally_rewriter::cubin::{CheckError, Cubin, check, rewrite};
use tally_rewriter::{KernelForm, Rewritten, TransformRefusal, TransformedKernel};

const ORDINARY: [(u32, &[u8]); 5] = [
    (80, include_bytes!("cubins/ordinary.80.cubin")),
    (86, include_bytes!("cubins/ordinary.86.cubin")),
    (89, include_bytes!("cubins/ordinary.89.cubin")),
    (90, include_bytes!("cubins/ordinary.90.cubin")),
    (90, include_bytes!("cubins/ordinary.90a.cubin")),
];
const GLOBALS: [&[u8]; 2] =
    [include_bytes!("cubins/globals.80.cubin"), include_bytes!("cubins/globals.90.cubin")];
const CLUSTER: &[u8] = include_bytes!("cubins/cluster.90.cubin");
const REGISTERS: &[u8] = include_bytes!("cubins/registers.90a.cubin");
const INDEX: [&[u8]; 4] = [
    include_bytes!("cubins/index.80.cubin"),
    include_bytes!("cubins/index.86.cubin"),
    include_bytes!("cubins/index.89.cubin"),
    include_bytes!("cubins/index.90.cubin"),
];
const NUMBERS: &[u8] = include_bytes!("cubins/numbers.90.cubin");
const OBJECT: &[u8] = include_bytes!("cubins/cluster.90.object.cubin");
const LINKED: &[u8] = include_bytes!("cubins/linked.90.cubin");
const LATER: [&[u8]; 2] =
    [include_bytes!("cubins/cluster.100.cubin"), include_bytes!("cubins/cluster.120.cubin")];

fn prelude(image: &[u8]) -> Rewritten {
    rewrite(image, KernelForm::ByClaims, None).expect("a cubin that can be patched")
}

fn refusals(rewritten: &Rewritten) -> HashMap<&str, TransformRefusal> {
    rewritten.refused.iter().map(|(name, why)| (name.as_str(), *why)).collect()
}

#[test]
fn ordinary_kernels_are_patched_and_say_where_the_control_block_goes() {
    for (arch, image) in ORDINARY {
        let rewritten = prelude(image);
        assert_eq!(rewritten.refused, [], "sm_{arch}");
        assert!(!rewritten.is_ptx);
        check(image, &rewritten.image).unwrap();
        let expected = [
            ("barriers", 3, 24),
            ("nothing", 0, 0),
            ("one", 1, 8),
            ("many", 4, 424),
            ("recursion", 2, 16),
            ("switcher", 2, 16),
        ];
        assert_eq!(rewritten.kernels.len(), expected.len());
        for (name, parameter_count, control_offset) in expected {
            // It calls functions through a table: what these do, its own code does not tell.
            let (name, may_wait) = (name.to_owned(), name == "switcher");
            let cluster = None;
            let reads_sm = may_wait;
            let kernel = TransformedKernel {
                name,
                parameter_count,
                control_offset,
                cluster,
                may_wait,
                reads_sm,
            };
            assert_eq!(rewritten.kernel(&kernel.name), Ok(&kernel), "sm_{arch}");
        }
    }
}

#[test]
fn only_what_is_asked_for_is_patched() {
    let (_, image) = ORDINARY[3];
    let rewritten = rewrite(image, KernelForm::ByClaims, Some(&["one", "absent"])).unwrap();
    assert_eq!(rewritten.kernels.len(), 1);
    assert_eq!(rewritten.kernel("one").unwrap().control_offset, 8);
    assert_eq!(rewritten.refused, [("absent".to_owned(), TransformRefusal::NoSuchKernel)]);
    check(image, &rewritten.image).unwrap();
    let (old, new) = (Cubin::parse(image).unwrap(), Cubin::parse(&rewritten.image).unwrap());
    let text = |cubin: &Cubin<'_>, name| cubin.sections[cubin.find(name).unwrap()].data.to_vec();
    assert_eq!(text(&old, ".text.many"), text(&new, ".text.many"));
    assert_ne!(text(&old, ".text.one"), text(&new, ".text.one"));
}

#[test]
fn a_rewrite_of_nothing_keeps_every_section() {
    for (_, image) in ORDINARY {
        let rewritten = rewrite(image, KernelForm::ByClaims, Some(&[])).unwrap();
        check(image, &rewritten.image).unwrap();
        let (old, new) = (Cubin::parse(image).unwrap(), Cubin::parse(&rewritten.image).unwrap());
        for (a, b) in old.sections.iter().zip(&new.sections) {
            assert_eq!(a.data, b.data, "{}", a.name);
        }
    }
}

#[test]
fn nothing_is_patched_twice() {
    for (_, image) in ORDINARY {
        let again = prelude(&prelude(image).image);
        assert_eq!(again.kernels, []);
        assert!(again.refused.iter().all(|(_, why)| *why == TransformRefusal::FirstInstruction));
        assert_eq!(again.refused.len(), 6);
    }
}

#[test]
fn kernels_that_use_variables_of_their_image_are_refused() {
    for image in GLOBALS {
        let rewritten = prelude(image);
        check(image, &rewritten.image).unwrap();
        let mut transformed: Vec<_> = rewritten.kernels.iter().map(|k| k.name.as_str()).collect();
        transformed.sort_unstable();
        assert_eq!(transformed, ["alone", "sine"]);
        let refused = refusals(&rewritten);
        for name in [
            "counts",
            "reads_initialised",
            "reads_constant",
            "one_constant",
            "address_of_constant",
            "prints",
            "by_function",
            // Calls the driver's `malloc`, with an index into the addresses of variables.
            "allocates",
        ] {
            assert_eq!(refused[name], TransformRefusal::WritableGlobals, "{name}");
        }
        assert_eq!(refused["grid_sync"], TransformRefusal::GridSync);
        assert_eq!(refused.len(), 9);
    }
}

#[test]
fn functions_in_sections_of_their_own_are_followed() {
    let rewritten = prelude(LINKED);
    check(LINKED, &rewritten.image).unwrap();
    assert_eq!(rewritten.kernel("calls_pure").unwrap().control_offset, 16);
    assert_eq!(rewritten.kernel("calls_counting"), Err(TransformRefusal::WritableGlobals));
}

#[test]
fn clusters_are_told_and_odd_ones_refused() {
    let rewritten = prelude(CLUSTER);
    check(CLUSTER, &rewritten.image).unwrap();
    assert_eq!(rewritten.kernel("cluster_of_4").unwrap().cluster, Some([4, 1, 1]));
    assert_eq!(rewritten.kernel("cluster_at_launch").unwrap().cluster, None);
    assert_eq!(rewritten.kernel("cluster_of_3"), Err(TransformRefusal::ClusterShape));
}

#[test]
fn register_reconfiguration_is_no_obstacle() {
    let rewritten = prelude(REGISTERS);
    check(REGISTERS, &rewritten.image).unwrap();
    assert_eq!(rewritten.kernel("reconfigures").unwrap().parameter_count, 1);
}

#[test]
fn other_images_are_refused_by_kind() {
    let refused = |image: &[u8], form| rewrite(image, form, None).unwrap_err();
    for image in LATER {
        assert_eq!(refused(image, KernelForm::ByClaims), TransformRefusal::Architecture);
    }
    assert_eq!(refused(OBJECT, KernelForm::ByClaims), TransformRefusal::Relocatable);
    for image in LATER {
        assert_eq!(refused(image, KernelForm::ByOffset), TransformRefusal::Architecture);
    }
    assert_eq!(refused(OBJECT, KernelForm::ByOffset), TransformRefusal::Relocatable);
    assert_eq!(refused(b"\x7fELF", KernelForm::ByClaims), TransformRefusal::Malformed);
    assert_eq!(
        refused(&CLUSTER[..CLUSTER.len() / 2], KernelForm::ByClaims),
        TransformRefusal::Malformed
    );
    assert_eq!(refused(b"", KernelForm::ByClaims), TransformRefusal::Malformed);
}

fn code<'c>(cubin: &'c Cubin<'_>, kernel: &str) -> &'c [u8] {
    &cubin.sections[cubin.find(&format!(".text.{kernel}")).unwrap()].data
}

/// Instructions of a kernel that are others; its first one is the same, and something is appended.
fn changed(old: &Cubin<'_>, new: &Cubin<'_>, kernel: &str) -> usize {
    let (a, b) = (code(old, kernel), code(new, kernel));
    assert!(b.len() > a.len() && a[..16] == b[..16]);
    a.chunks(16).zip(b.chunks(16)).filter(|(x, y)| x != y).count()
}

/// A read that was left as it is would have the slice's index, or the slice's number of blocks.
#[test]
fn the_check_notices_a_read_that_is_not_patched() {
    for image in INDEX {
        let patched = rewrite(image, KernelForm::ByOffset, None).unwrap().image;
        let (old, new) = (Cubin::parse(image).unwrap(), Cubin::parse(&patched).unwrap());
        for name in ["by_thread", "uniform", "grid_stride", "behind_a_branch"] {
            let (a, b) = (code(&old, name), code(&new, name));
            let at = patched.windows(b.len()).position(|w| w == b).unwrap();
            for (index, (x, y)) in a.chunks(16).zip(b.chunks(16)).enumerate() {
                if x != y {
                    let mut wrong = patched.clone();
                    wrong[at + index * 16..at + index * 16 + 16].copy_from_slice(x);
                    assert!(check(image, &wrong).is_err(), "sm_{} {name} {index}", old.arch);
                }
            }
        }
    }
}

#[test]
fn the_form_by_offset_changes_only_what_knows_of_the_grid() {
    for (arch, image) in ORDINARY {
        let rewritten = rewrite(image, KernelForm::ByOffset, None).unwrap();
        // A uniform register says which constant it reads, of its jump table: it could be any.
        assert_eq!(
            rewritten.refused,
            [("switcher".to_owned(), TransformRefusal::IndexRead)],
            "sm_{arch}"
        );
        check(image, &rewritten.image).unwrap();
        let (old, new) = (Cubin::parse(image).unwrap(), Cubin::parse(&rewritten.image).unwrap());
        for kernel in &rewritten.kernels {
            // The parameters are those of the prelude, so that either form can be chosen at a launch.
            assert_eq!(prelude(image).kernel(&kernel.name), Ok(kernel));
            let changed = changed(&old, &new, &kernel.name);
            let expected = usize::from(kernel.name == "barriers");
            assert_eq!(changed, expected, "sm_{arch} {}", kernel.name);
        }
    }
    for image in INDEX {
        let rewritten = rewrite(image, KernelForm::ByOffset, None).unwrap();
        check(image, &rewritten.image).unwrap();
        let refused = refusals(&rewritten);
        assert_eq!(refused.len(), 2);
        // Through the object's table: into the original's code, which knows of no slice.
        assert_eq!(refused["by_address"], TransformRefusal::IndexInFunction);
        // So is the driver's assertion, where that is called by its address.
        assert_eq!(refused["asserts"], TransformRefusal::IndexInFunction);
        assert_eq!(prelude(image).refused, [], "the prelude needs none of this");
        let (old, new) = (Cubin::parse(image).unwrap(), Cubin::parse(&rewritten.image).unwrap());
        for (name, expected) in [
            ("by_thread", 1),
            ("uniform", 2),
            ("grid_stride", 2),
            ("behind_a_branch", 1),
            ("no_index", 0),
        ] {
            let changed = changed(&old, &new, name);
            assert_eq!(changed, expected, "sm_{} {name}", old.arch);
        }
    }
    let numbers = rewrite(NUMBERS, KernelForm::ByOffset, None).unwrap();
    assert_eq!(numbers.kernel("clusters"), Err(TransformRefusal::IndexRead));
    let clusters = rewrite(CLUSTER, KernelForm::ByOffset, None).unwrap();
    for name in ["cluster_of_3", "cluster_of_4"] {
        assert_eq!(clusters.kernel(name), Err(TransformRefusal::ClusterShape));
    }
    let globals = rewrite(GLOBALS[1], KernelForm::ByOffset, None).unwrap();
    assert_eq!(refusals(&globals)["counts"], TransformRefusal::WritableGlobals);
    check(GLOBALS[1], &globals.image).unwrap();
    let linked = rewrite(LINKED, KernelForm::ByOffset, None).unwrap();
    check(LINKED, &linked.image).unwrap();
    assert!(linked.kernel("calls_pure").is_ok());
}

/// A function shares uniform registers with its caller: the range's first block goes where neither has anything.
#[test]
fn a_register_of_a_function_that_is_called_is_not_spare() {
    let put = |image: &mut [u8], name: &str, number: usize, instruction: u128| {
        let start = code(&Cubin::parse(image).unwrap(), name).as_ptr() as usize;
        let at = start - image.as_ptr() as usize + number * 16;
        image[at..at + 16].copy_from_slice(&instruction.to_le_bytes());
    };
    // The kernel reads the index: S2R R2, SR_CTAID.X, behind its call.
    let read = 0x000e_2200_0000_2500_0000_0000_0002_7919;
    let mut image = LINKED.to_vec();
    put(&mut image, "calls_pure", 7, read);
    let patched = |image: &[u8]| {
        let rewritten = rewrite(image, KernelForm::ByOffset, Some(&["calls_pure"])).unwrap();
        assert_eq!(rewritten.refused, []);
        check(image, &rewritten.image).unwrap();
        rewritten.image
    };
    // Where the appended code loads the first block to: ULDC.
    let register = |patched: &[u8]| {
        let cubin = Cubin::parse(patched).unwrap();
        let original = code(&Cubin::parse(LINKED).unwrap(), "calls_pure").len();
        let loads = code(&cubin, "calls_pure")[original..].chunks(16);
        let mut loads = loads.filter(|i| i[0] == 0xb9 && i[1] & 0xf == 0xa);
        u128::from(loads.next().unwrap()[2])
    };
    let before = patched(&image);
    let first = register(&before);
    // Now the function reads that one: MOV R4, UR.
    let moves = 0x000f_e400_0800_0f00_0000_0000_0004_7c02 | first << 32;
    put(&mut image, "squares", 0, moves);
    let other = register(&patched(&image));
    assert_ne!(other, first);
    let mut wrong = before;
    put(&mut wrong, "squares", 0, moves);
    let error = check(&image, &wrong).unwrap_err();
    assert!(matches!(error, CheckError::Section { section, .. } if section == ".text.calls_pure"));
}

/// Cubins of older tools have the architecture in the lowest byte of the flags.
#[test]
fn both_layouts_of_the_flags_are_read() {
    let mut old = CLUSTER.to_vec();
    old[7] = 51;
    old[48..52].copy_from_slice(&0x005a_055au32.to_le_bytes());
    assert_eq!(Cubin::parse(&old).unwrap().arch, 90);
    assert_eq!(Cubin::parse(CLUSTER).unwrap().arch, 90);
    let rewritten = prelude(&old);
    assert_eq!(rewritten.kernels.len(), 2);
    check(&old, &rewritten.image).unwrap();
}

/// The same image with a section of another kind, which refers to no other section.
fn with_kind(image: &[u8], name: &str, kind: u32) -> Vec<u8> {
    let index = Cubin::parse(image).unwrap().find(name).unwrap();
    let headers = u64::from_le_bytes(image[40..48].try_into().unwrap()) as usize;
    let mut changed = image.to_vec();
    let header = &mut changed[headers + 64 * index..][..64];
    header[4..8].copy_from_slice(&kind.to_le_bytes());
    header[44..48].fill(0);
    changed
}

const STRINGS: u32 = 3;
const RELOCATIONS: u32 = 9;

#[test]
fn a_kernel_whose_sections_are_tables_of_the_file_is_refused() {
    let (_, image) = ORDINARY[3];
    let kernels = [("one", image, STRINGS), ("reconfigures", REGISTERS, RELOCATIONS)];
    for (kernel, image, kind) in kernels {
        for section in [".nv.info.", ".text."].map(|prefix| format!("{prefix}{kernel}")) {
            let changed = with_kind(image, &section, kind);
            let rewritten = prelude(&changed);
            assert_eq!(rewritten.kernel(kernel), Err(TransformRefusal::Metadata), "{section}");
            Cubin::parse(&rewritten.image).unwrap().relocations().unwrap();
        }
    }
    for section in [".nv.constant0.one", ".nv.info"] {
        let rewritten = prelude(&with_kind(image, section, STRINGS));
        assert_eq!(rewritten.kernel("one"), Err(TransformRefusal::Metadata), "{section}");
    }
}

#[test]
fn the_check_notices_relocations_that_cannot_be_read() {
    let rewritten = prelude(REGISTERS);
    let name = ".nv.info.reconfigures";
    let [old, new] = [REGISTERS, &rewritten.image].map(|image| with_kind(image, name, RELOCATIONS));
    let unreadable = CheckError::Unreadable { which: "patched image" };
    assert_eq!(check(&old, &new), Err(unreadable));
}

#[test]
fn the_check_notices_any_changed_byte_of_code_and_constants() {
    let (_, image) = ORDINARY[3];
    notices_changes(image, &prelude(image).image);
    notices_changes(image, &rewrite(image, KernelForm::ByOffset, None).unwrap().image);
}

fn notices_changes(image: &[u8], patched: &[u8]) {
    check(image, patched).unwrap();
    let before = Cubin::parse(patched).unwrap();
    let old = Cubin::parse(image).unwrap();
    for (section, original) in before.sections.iter().zip(&old.sections) {
        let kept = [".text.", ".nv.constant", ".debug", ".note"];
        if original.data.is_empty() || !kept.iter().any(|k| section.name.starts_with(k)) {
            continue;
        }
        let at = patched.windows(section.data.len()).position(|w| w == &*section.data).unwrap();
        let mut step = 16;
        while step < original.data.len() {
            let mut changed = patched.to_vec();
            changed[at + step] ^= 0x40;
            assert!(check(image, &changed).is_err(), "{} at {step}", section.name);
            step += original.data.len() / 7 + 1;
        }
    }
    let other = check(CLUSTER, patched).unwrap_err();
    assert!(matches!(other, CheckError::Structure { .. }));
}

#[test]
fn no_prefix_or_flipped_bit_makes_it_panic() {
    let (_, image) = ORDINARY[0];
    for end in (0..image.len()).step_by(61) {
        for form in [KernelForm::ByClaims, KernelForm::ByOffset] {
            let _ = rewrite(&image[..end], form, None);
        }
    }
    let mut image = image.to_vec();
    for bit in (0..image.len() * 8).step_by(389) {
        image[bit / 8] ^= 1 << (bit % 8);
        for form in [KernelForm::ByClaims, KernelForm::ByOffset] {
            if let Ok(rewritten) = rewrite(&image, form, None) {
                check(&image, &rewritten.image).unwrap();
            }
        }
        image[bit / 8] ^= 1 << (bit % 8);
    }
}

/// The metadata of one kernel before and after, whole.
#[test]
fn metadata_changes_as_written_down() {
    for (arch, image, golden) in [
        (80, ORDINARY[0].1, include_str!("cubins/barriers.80.golden")),
        (90, ORDINARY[3].1, include_str!("cubins/barriers.90.golden")),
    ] {
        let rewritten =
            rewrite(image, KernelForm::ByClaims, Some(&["barriers", "nothing"])).unwrap();
        let mut text = String::new();
        for (title, image) in [("before", image), ("after", &rewritten.image)] {
            let cubin = Cubin::parse(image).unwrap();
            for section in &cubin.sections {
                let ours =
                    section.name.ends_with(".barriers") || section.name.ends_with(".nothing");
                if !ours {
                    continue;
                }
                let info = section.info;
                text +=
                    &format!("{title} {} bytes {} info {info:#x}\n", section.name, section.bytes());
                if section.name.starts_with(".nv.info") {
                    text += &attributes(&section.data);
                }
            }
            for symbol in &cubin.symbols {
                if ["barriers", "nothing"].contains(&symbol.name) {
                    text += &format!("{title} symbol {} bytes {}\n", symbol.name, symbol.size);
                }
            }
        }
        if std::env::var_os("TALLY_WRITE_GOLDEN").is_some() {
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cubins");
            std::fs::write(format!("{folder}/barriers.{arch}.golden"), &text).unwrap();
        } else {
            assert_eq!(text, golden, "sm_{arch}");
        }
    }
}

/// Attributes of `.nv.info`, one a line.
fn attributes(mut data: &[u8]) -> String {
    let mut out = String::new();
    while let [format, number, low, high, rest @ ..] = data {
        let value = u16::from_le_bytes([*low, *high]);
        out += &format!("  {number:#04x} ");
        if *format == 4 {
            let (bytes, after) = rest.split_at(value.into());
            let words =
                bytes.chunks(4).map(|w| w.iter().rev().map(|b| format!("{b:02x}")).collect());
            out += &words.collect::<Vec<String>>().join(" ");
            data = after;
        } else {
            out += &format!("= {value}");
            data = rest;
        }
        out += "\n";
    }
    out
}

#[test]
fn machine_code_in_a_container_is_patched_for_its_device() {
    use tally_rewriter::fatbin::{Kind, pack};
    use tally_rewriter::image;
    let container = pack(&[(Kind::Elf, 80, ORDINARY[0].1), (Kind::Elf, 90, ORDINARY[3].1)]);
    for (arch, original) in [(80, ORDINARY[0].1), (89, ORDINARY[0].1), (90, ORDINARY[3].1)] {
        let rewritten =
            image::rewrite(&container, arch, KernelForm::ByClaims, Some(&["one"])).unwrap();
        assert_eq!(rewritten.kernel("one").unwrap().control_offset, 8);
        check(original, &rewritten.image).unwrap();
    }
    let refused = image::rewrite(&container, 75, KernelForm::ByClaims, None);
    assert_eq!(refused.unwrap_err(), TransformRefusal::NoCodeForDevice);
    // Which of two for one device the driver takes is not known; what is for other devices does not matter.
    let two = pack(&[80, 90, 80].map(|arch| (Kind::Elf, arch, ORDINARY[0].1)));
    let refused = image::rewrite(&two, 80, KernelForm::ByClaims, None);
    assert_eq!(refused.unwrap_err(), TransformRefusal::SeveralCodes);
    assert!(image::rewrite(&two, 90, KernelForm::ByClaims, None).is_ok());
}
