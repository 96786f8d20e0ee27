//! The table of entry points against NVIDIA's headers: whatever uses a stream is in it.
//!
//! `TALLY_CUDA_INCLUDE` is the folder of `cuda.h`, for example of the PyPI package `nvidia-cuda-runtime`:
//! `TALLY_CUDA_INCLUDE=... cargo xtask test cuda`.

use std::collections::BTreeSet;
use tally_shim::entry_points::ENTRY_POINTS;
use tally_shim::table;

/// Header, functions in it at least, and whether one that takes a stream by a pointer uses it: else it makes one.
const HEADERS: [(&str, usize, bool); 4] = [
    ("cuda.h", 500, false),
    ("cudaGL.h", 15, false),
    ("cudaEGL.h", 10, true),
    ("cudaVDPAU.h", 4, false),
];
/// They only answer, or are about a capture.
const ASK_ONLY: &str = "cuStreamGetAttribute cuStreamGetCaptureInfo cuStreamGetCaptureInfo_v2 cuStreamGetCaptureInfo_v3 cuStreamGetCtx \
    cuStreamGetCtx_v2 cuStreamGetDevResource cuStreamGetDevice cuStreamGetFlags cuStreamGetGreenCtx cuStreamGetId \
    cuStreamGetPriority cuStreamIsCapturing cuStreamUpdateCaptureDependencies cuStreamUpdateCaptureDependencies_v2";
/// With addresses of 32 bits: for programs built with CUDA 3.1 or older.
const OLD: &str = "cuGLMapBufferObjectAsync cuMemcpy2DAsync cuMemcpy3DAsync cuMemcpyAtoHAsync cuMemcpyDtoDAsync \
    cuMemcpyDtoHAsync cuMemcpyHtoAAsync cuMemcpyHtoDAsync";

fn without_comments(text: &str) -> String {
    let (mut code, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once("/*") {
        code.push_str(before);
        rest = after.split_once("*/").map_or("", |(_, after)| after);
    }
    code.push_str(rest);
    code.lines().flat_map(|line| [line.split("//").next().unwrap_or(""), "\n"]).collect()
}

/// What a header says of functions.
#[derive(Default)]
struct Functions {
    all: BTreeSet<String>,
    /// They use a stream that they are given, or launch something.
    of_streams: BTreeSet<String>,
    /// Variants for threads with default streams of their own.
    variants: BTreeSet<String>,
}

impl Functions {
    fn of(header: &str, by_pointer: bool) -> Self {
        let (header, mut found) = (without_comments(header), Functions::default());
        for declaration in header.split("CUDAAPI").skip(1) {
            let Some((name, rest)) = declaration.split_once('(') else { continue };
            let Some((arguments, _)) = rest.split_once(';') else { continue };
            // Types of functions are written `(CUDAAPI *name)(...)`.
            let name = name.trim();
            if !name.starts_with("cu") || name.contains(char::is_whitespace) {
                continue;
            }
            found.all.insert(name.to_owned());
            let is_one = |after: &str| {
                let is_name = after.starts_with(|c: char| c.is_alphanumeric() || c == '_');
                !is_name && (by_pointer || !after.trim_start().starts_with('*'))
            };
            if name.starts_with("cuLaunch") || arguments.split("CUstream").skip(1).any(is_one) {
                found.of_streams.insert(name.to_owned());
            }
        }
        for (macro_name, suffix) in [("__CUDA_API_PTSZ(", "_ptsz"), ("__CUDA_API_PTDS(", "_ptds")] {
            let names =
                header.split(macro_name).skip(1).filter_map(|rest| Some(rest.split_once(')')?.0));
            let is_function = |name: &&str| name.starts_with("cu");
            found.variants.extend(names.filter(is_function).map(|name| name.to_owned() + suffix));
        }
        found
    }

    /// Those that the table should have.
    fn missing(&self) -> Vec<&str> {
        table::set(ENTRY_POINTS);
        let is_of = |list: &str, name: &str| list.split_whitespace().any(|one| one == name);
        let is_fine = |name: &&str| {
            let asks = is_of(ASK_ONLY, name.trim_end_matches("_ptsz"));
            asks || is_of(OLD, name) || table::exact(name.as_bytes()).is_some()
        };
        self.of_streams
            .union(&self.variants)
            .map(String::as_str)
            .filter(|name| !is_fine(name))
            .collect()
    }
}

#[test]
fn declarations_are_read() {
    let header = "#define cuG __CUDA_API_PTSZ(cuG)\n#define __CUDA_API_PTDS(api) api ## _ptds\n\
        CUresult CUDAAPI cuA(CUstream a); /* CUresult CUDAAPI cuB(CUstream a); */\n\
        typedef CUresult (CUDAAPI *pfn)(CUstream a);\n\
        CUresult CUDAAPI cuC(CUstream *a, CUstreamCaptureMode b); // CUresult CUDAAPI cuD(CUstream a);\n\
        CUresult CUDAAPI\ncuE(int a,\n    CUstream b);\nCUresult CUDAAPI cuLaunchF(const CUlaunchConfig *a);\n\
        CUresult CUDAAPI cuStreamQuery(CUstream a);\n";
    let functions = Functions::of(header, false);
    let all: Vec<&str> = functions.all.iter().map(String::as_str).collect();
    assert_eq!(all, ["cuA", "cuC", "cuE", "cuLaunchF", "cuStreamQuery"]);
    assert_eq!(functions.missing(), ["cuA", "cuE", "cuG_ptsz", "cuLaunchF"]);
    assert!(Functions::of(header, true).missing().contains(&"cuC"));
}

#[test]
#[ignore = "needs NVIDIA's headers: cargo xtask test cuda"]
fn whatever_uses_a_stream_is_replaced() {
    let folder =
        std::env::var("TALLY_CUDA_INCLUDE").expect("TALLY_CUDA_INCLUDE is the folder of cuda.h");
    for (name, least, by_pointer) in HEADERS {
        let path = std::path::Path::new(&folder).join(name);
        let text = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let functions = Functions::of(&String::from_utf8_lossy(&text), by_pointer);
        assert!(functions.all.len() >= least, "{name}: {} functions", functions.all.len());
        let missing = functions.missing();
        assert!(missing.is_empty(), "{name}: not in the table of entry points: {missing:?}");
        println!(
            "{name}: {} functions, {} of streams",
            functions.all.len(),
            functions.of_streams.len()
        );
    }
}
