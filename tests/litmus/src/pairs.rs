//! Pairs of images that are hard to tell apart: the same kernel names and length, one byte
//! different. Both are loaded and launched; each must compute its own values, in whatever form its
//! launches run. Under Tally the launches of each image go on until one was transformed, for [`FORM_WAIT_MAX`] at
//! most, and a pair counts as transformed if both its images had such a launch.

use crate::cu::{Done, Failed, Handle};
use crate::region;
use crate::run::Machine;
use fastrand::Rng;
use serde_json::json;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tally_rewriter::fatbin;

/// Pairs whose images are loaded at one time.
const GROUP: usize = 16;
/// Launches of each image together with the others, and the pause between two rounds, in which transformed forms are
/// made.
const ROUNDS: u32 = 7;
const PAUSE: Duration = Duration::from_millis(3);
/// How long the images of a group are launched one by one until each was transformed. A form takes some ms; policies
/// that choose at random may choose others first, and a context is not always idle.
const FORM_WAIT_MAX: Duration = Duration::from_secs(10);
/// Blocks of a launch, and words that each writes to.
const BLOCKS: u32 = 24;
const WORDS: u32 = BLOCKS + 1;
/// Most bytes of an image.
const IMAGE_BYTES_MAX: usize = 72 << 10;

/// How the two images of a pair differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Difference {
    /// A digit of a number in an instruction.
    Operand,
    /// A letter of an instruction's name.
    Opcode,
    /// A digit of an address's offset.
    Offset,
    /// A digit of a constant's initial value.
    Constant,
    /// A digit in another kernel of the module.
    Sibling,
    /// A digit in a comment, which changes nothing.
    Comment,
}

/// How images are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Heap,
    Static,
    File,
    Library,
    Fatbin,
}

const DIFFERENCES: [Difference; 7] = {
    use Difference::{Comment, Constant, Offset, Opcode, Operand, Sibling};
    [Operand, Operand, Opcode, Offset, Constant, Sibling, Comment]
};
const WAYS: [Way; 6] = [Way::Heap, Way::Heap, Way::Static, Way::File, Way::Library, Way::Fatbin];

/// An image of a pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    text: String,
    kernel: &'static str,
    /// What block `i` writes is `(i * 3 + add)`, shifted left or right by one, plus `constant`, to
    /// word `i + offset`.
    add: u32,
    left: bool,
    constant: u32,
    offset: u32,
}

impl Image {
    /// The words that a launch leaves.
    fn values(&self) -> Vec<u32> {
        let mut words = vec![0; WORDS as usize];
        for i in 0..BLOCKS {
            let sum = i * 3 + self.add;
            let shifted = if self.left { sum << 1 } else { sum >> 1 };
            words[(i + self.offset) as usize] = shifted + self.constant;
        }
        words
    }
}

#[derive(Clone, Debug)]
pub struct Pair {
    pub difference: Difference,
    pub way: Way,
    pub images: [Image; 2],
}

/// The pair of a seed.
pub fn pair(seed: u64) -> Pair {
    let mut rng = Rng::with_seed(seed);
    let difference = DIFFERENCES[rng.usize(0..DIFFERENCES.len())];
    let way = WAYS[rng.usize(0..WAYS.len())];
    // Mostly short ones, to have many of them; some longer than what anybody samples.
    let bytes = match rng.u32(0..40) {
        0 => rng.usize(20_000..IMAGE_BYTES_MAX - 4_000),
        1..=4 => rng.usize(4_000..20_000),
        _ => rng.usize(0..1_500),
    };
    // Comments before the code and after it: it may be anywhere.
    let before = rng.usize(0..=bytes);
    let numbers = [rng.u32(1_000..10_000), rng.u32(1_000..10_000), rng.u32(1_000..10_000)];
    let digit = 10_u32.pow(rng.u32(0..4));
    let other =
        |number: u32| if number / digit % 10 == 9 { number - digit } else { number + digit };
    let image = |second: bool| {
        let is = |what| second && difference == what;
        let pick = |what, number: u32| if is(what) { other(number) } else { number };
        let sibling = difference == Difference::Sibling;
        let kernel = if sibling { "other" } else { "k" };
        let add = pick(Difference::Operand, numbers[0]);
        let second_add = pick(Difference::Sibling, numbers[1]);
        let constant = pick(Difference::Constant, numbers[2]);
        let with_constant = difference == Difference::Constant;
        let (left, offset) = (!is(Difference::Opcode), u32::from(is(Difference::Offset)));
        let comment = if is(Difference::Comment) { '1' } else { '0' };
        let mut text = String::from(".version 7.0\n.target sm_70\n.address_size 64\n");
        text += &format!("// {seed:016x} {comment}\n");
        pad(&mut text, before);
        if with_constant {
            text += &format!(".const .align 4 .u32 number = {constant};\n");
        }
        text += &body("k", add, left, offset, with_constant);
        text += &body("other", second_add, true, 0, false);
        pad(&mut text, bytes - before);
        Image {
            text,
            kernel,
            add: if sibling { second_add } else { add },
            left,
            constant: if with_constant { constant } else { 0 },
            offset,
        }
    };
    Pair { difference, way, images: [image(false), image(true)] }
}

fn pad(text: &mut String, bytes: usize) {
    for _ in 0..bytes / 64 {
        text.push_str("// ............................................................\n");
    }
}

fn body(name: &str, add: u32, left: bool, offset: u32, with_constant: bool) -> String {
    let shift = if left { "shl.b32" } else { "shr.b32" };
    let constant = if with_constant { "ld.const.u32 %r3, [number];" } else { "mov.u32 %r3, 0;" };
    format!(
        ".visible .entry {name}(.param .u64 p) {{
    .reg .b32 %r<4>;
    .reg .b64 %d<4>;
    ld.param.u64 %d1, [p];
    mov.u32 %r1, %ctaid.x;
    mul.wide.u32 %d2, %r1, 4;
    add.s64 %d3, %d1, %d2;
    mul.lo.u32 %r2, %r1, 3;
    add.u32 %r2, %r2, {add};
    {shift} %r2, %r2, 1;
    {constant}
    add.u32 %r2, %r2, %r3;
    st.global.u32 [%d3+{}], %r2;
    ret;
}}
",
        4 * offset
    )
}

/// A loaded image and its words.
struct Loaded<'a> {
    image: &'a Image,
    module: Handle,
    library: Handle,
    function: Handle,
    words: u64,
    /// Its index in the shim's table, where there is a shim.
    kernel: Option<u32>,
}

impl Loaded<'_> {
    fn launch(&self, machine: &Machine, stream: Handle) -> Done {
        let params = [std::ptr::from_ref(&self.words).cast_mut().cast()];
        let (launch, none) = (machine.cuda, std::ptr::null());
        // SAFETY: a function and a stream of ours, and its one argument.
        unsafe {
            launch.cuLaunchKernel(
                false,
                self.function,
                BLOCKS,
                1,
                1,
                32,
                1,
                1,
                0,
                stream,
                params.as_ptr(),
                none,
            )
        }
    }

    /// Launches it by itself, and says whether its values are wrong.
    fn check_alone(&self, machine: &Machine, stream: Handle) -> Result<Option<String>, Failed> {
        let cuda = machine.cuda;
        let mut got = vec![0_u32; WORDS as usize];
        // SAFETY: memory and a stream of ours; both sides of the copy have that many bytes.
        unsafe {
            cuda.cuMemsetD32Async(false, self.words, 0, WORDS as usize, stream)?;
            self.launch(machine, stream)?;
            cuda.cuStreamSynchronize(false, stream)?;
            cuda.cuMemcpyDtoH_v2(got.as_mut_ptr().cast(), self.words, 4 * WORDS as usize)?;
        }
        Ok((got != self.image.values()).then(|| format!("alone: {:?} ...", &got[..4])))
    }
}

/// Where images of [`Way::Static`] lie: all of a process at one place.
static STATIC: Mutex<[u8; IMAGE_BYTES_MAX]> = Mutex::new([0; IMAGE_BYTES_MAX]);

/// Loads and launches so many pairs; prints JSON lines and says whether all were right.
///
/// # Errors
/// If a call fails.
pub fn serve(machine: &Machine, seed: u64, count: u64, until: Instant) -> Result<bool, Failed> {
    println!("{}", json!({"ready": true}));
    let (mut done, mut wrong, mut transformed, mut first) = (0, 0, 0, None);
    let mut kinds: BTreeMap<String, u64> = BTreeMap::new();
    let mut at = seed;
    while at < seed + count && Instant::now() < until {
        let seeds: Vec<u64> = (at..seed + count).take(GROUP).collect();
        let pairs: Vec<Pair> = seeds.iter().map(|&seed| pair(seed)).collect();
        let (found, forms) = group(machine, &pairs)?;
        transformed += forms;
        for (pair, why) in found {
            wrong += 1;
            let Pair { difference, way, images } = &pairs[pair];
            let kind = format!("{difference:?} by {way:?}");
            let bytes = images[0].text.len();
            first.get_or_insert_with(|| {
                format!("pair {} ({kind}, {bytes} bytes): {why}", seeds[pair])
            });
            *kinds.entry(kind).or_default() += 1;
        }
        at += seeds.len() as u64;
        done += seeds.len() as u64;
    }
    println!(
        "{}",
        json!({"pairs": done, "wrong": wrong, "transformed": transformed, "first": first, "kinds": kinds})
    );
    Ok(wrong == 0)
}

/// The pairs that were wrong, and how; and how many were transformed.
fn group(machine: &Machine, pairs: &[Pair]) -> Result<(Vec<(usize, String)>, u64), Failed> {
    let cuda = machine.cuda;
    let mut stream = 0;
    let bytes = 4 * WORDS as usize * 2 * pairs.len();
    let mut words = 0;
    // SAFETY: valid out pointers.
    unsafe {
        cuda.cuStreamCreateWithPriority(&mut stream, 1, machine.least_priority)?;
        cuda.cuMemAlloc_v2(&mut words, bytes)?;
    }
    let mut all = Vec::new();
    for (p, pair) in pairs.iter().enumerate() {
        for (i, image) in pair.images.iter().enumerate() {
            let words = words + u64::from(4 * WORDS) * (2 * p + i) as u64;
            let kernel = region::of_shim().map(region::kernels);
            all.push((p, Loaded { kernel, ..load(machine, image, pair.way, words)? }));
        }
    }
    let mut found: Vec<(usize, String)> = Vec::new();
    for round in 0..ROUNDS {
        // SAFETY: all of the memory, and a stream, of ours.
        unsafe { cuda.cuMemsetD32Async(false, words, 0, bytes / 4, stream) }?;
        for (_, loaded) in &all {
            loaded.launch(machine, stream)?;
        }
        let mut got = vec![0_u32; bytes / 4];
        // SAFETY: a stream of ours; both sides of the copy have that many bytes.
        unsafe {
            cuda.cuStreamSynchronize(false, stream)?;
            cuda.cuMemcpyDtoH_v2(got.as_mut_ptr().cast(), words, bytes)?;
        }
        for ((p, loaded), got) in all.iter().zip(got.chunks(WORDS as usize)) {
            if got != loaded.image.values() && found.iter().all(|(other, _)| other != p) {
                found.push((*p, format!("round {round}: {:?} ...", &got[..4])));
            }
        }
        std::thread::sleep(PAUSE);
    }
    let mut waiting: Vec<&(usize, Loaded<'_>)> = all.iter().collect();
    if let Some(region) = region::of_shim() {
        let until = Instant::now() + FORM_WAIT_MAX;
        let is_refused = |(_, loaded): &(usize, Loaded<'_>)| {
            loaded.kernel.is_some_and(|kernel| region::is_refused(region, kernel))
        };
        while !waiting.iter().all(|one| is_refused(one)) && Instant::now() < until {
            let mut left = Vec::new();
            for one in waiting {
                let before = region::transformed(region);
                let (pair, loaded) = one;
                if let Some(why) = loaded.check_alone(machine, stream)?
                    && found.iter().all(|(other, _)| other != pair)
                {
                    found.push((*pair, why));
                }
                if region::transformed(region) == before {
                    left.push(one);
                }
            }
            waiting = left;
            std::thread::sleep(PAUSE);
        }
    }
    let is_whole = |pair: &usize| waiting.iter().any(|(other, _)| other == pair);
    let transformed = (0..pairs.len()).filter(|pair| !is_whole(pair)).count() as u64;
    for (_, loaded) in &all {
        // SAFETY: ours, not used again, here and below.
        unsafe {
            if loaded.library == 0 {
                cuda.cuModuleUnload(loaded.module)?;
            } else {
                cuda.cuLibraryUnload(loaded.library)?;
            }
        }
    }
    // SAFETY: as above.
    unsafe {
        cuda.cuMemFree_v2(words)?;
        cuda.cuStreamDestroy_v2(stream)?;
    }
    Ok((found, transformed))
}

fn load<'a>(
    machine: &Machine,
    image: &'a Image,
    way: Way,
    words: u64,
) -> Result<Loaded<'a>, Failed> {
    let cuda = machine.cuda;
    let mut loaded = Loaded { image, module: 0, library: 0, function: 0, words, kernel: None };
    let bytes = [image.text.as_bytes(), &[0]].concat();
    let name = CString::new(image.kernel).unwrap_or_default();
    let name = name.as_ptr().cast();
    // SAFETY, for all: images that live through the call, C strings and valid out pointers.
    match way {
        Way::Heap => {
            // SAFETY: see above.
            unsafe { cuda.cuModuleLoadData(&mut loaded.module, bytes.as_ptr()) }?;
        }
        Way::Static => {
            let mut buffer = STATIC.lock().unwrap_or_else(PoisonError::into_inner);
            buffer[..bytes.len()].copy_from_slice(&bytes);
            // SAFETY: see above.
            unsafe { cuda.cuModuleLoadData(&mut loaded.module, buffer.as_ptr()) }?;
        }
        Way::File => {
            let path = machine.folder.join("pair.ptx");
            let next = machine.folder.join("pair.new");
            let written = std::fs::write(&next, &image.text);
            written
                .and_then(|()| std::fs::rename(&next, &path))
                .map_err(|_| Failed { call: "writing a module's file", code: 0 })?;
            let path = CString::new(path.to_string_lossy().as_bytes()).unwrap_or_default();
            // SAFETY: see above.
            unsafe { cuda.cuModuleLoad(&mut loaded.module, path.as_ptr().cast()) }?;
        }
        Way::Fatbin => {
            let packed = fatbin::pack(&[(fatbin::Kind::Ptx, 70, &bytes)]);
            // SAFETY: see above.
            unsafe { cuda.cuModuleLoadData(&mut loaded.module, packed.as_ptr()) }?;
        }
        Way::Library => {
            let (none, nothing) = (std::ptr::null(), std::ptr::null());
            let mut kernel = 0;
            // SAFETY: see above.
            unsafe {
                cuda.cuLibraryLoadData(
                    &mut loaded.library,
                    bytes.as_ptr(),
                    none,
                    nothing,
                    0,
                    none,
                    nothing,
                    0,
                )?;
                cuda.cuLibraryGetKernel(&mut kernel, loaded.library, name)?;
                cuda.cuKernelGetFunction(&mut loaded.function, kernel)?;
            }
            return Ok(loaded);
        }
    }
    // SAFETY: see above.
    unsafe { cuda.cuModuleGetFunction(&mut loaded.function, loaded.module, name) }?;
    Ok(loaded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_of_a_pair_differ_in_one_byte() {
        let mut seen = std::collections::BTreeSet::new();
        let mut places = [0_u32; 4];
        for seed in 0..2_000 {
            let Pair { difference, way, images: [one, other] } = pair(seed);
            seen.insert(format!("{difference:?} {way:?}"));
            let bytes = |image: &Image| image.text.clone().into_bytes();
            let (a, b) = (bytes(&one), bytes(&other));
            assert_eq!(a.len(), b.len());
            assert!(a.len() < IMAGE_BYTES_MAX);
            let different: Vec<usize> = (0..a.len()).filter(|&i| a[i] != b[i]).collect();
            assert_eq!(different.len(), 1, "{difference:?}");
            places[4 * different[0] / a.len()] += 1;
            let same_values = one.values() == other.values();
            assert_eq!(same_values, difference == Difference::Comment);
        }
        assert_eq!(seen.len(), 30, "{seen:?}");
        assert!(places.iter().all(|&count| count > 50), "{places:?}");
    }
}
