//! The table of entry points against NVIDIA's headers: whatever uses a stream is in it.
//!
//! `TALLY_CUDA_HEADER` is `cuda.h` beside its other headers, for example of the PyPI package `nvidia-cuda-runtime`:
//! `TALLY_CUDA_HEADER=... cargo xtask test cuda`.

use std::collections::BTreeSet;
use tally_shim::entry_points::ENTRY_POINTS;
use tally_shim::{known, table};

/// Header, functions in it at least, and whether one that takes a stream by a pointer uses it: else it makes one.
const HEADERS: [(&str, usize, bool); 4] = [
    ("cuda.h", 500, false),
    ("cudaGL.h", 15, false),
    ("cudaEGL.h", 10, true),
    ("cudaVDPAU.h", 4, false),
];
/// What uses a stream, of CUDA 13.5, for machines that lack its headers.
const OF_STREAMS: &str = "\
    cuEventRecord cuEventRecordWithFlags cuGraphLaunch cuGraphUpload cuGraphicsMapResources cuGraphicsUnmapResources \
    cuLaunch cuLaunchGrid cuLaunchCooperativeKernel cuLaunchCooperativeKernelMultiDevice cuLaunchGridAsync \
    cuLaunchHostFunc cuLaunchHostFunc_v2 cuLaunchKernel cuLaunchKernelEx cuMemAllocAsync \
    cuMemAllocFromPoolAsync cuMemBatchDecompressAsync cuMemDiscardAndPrefetchBatchAsync cuMemDiscardBatchAsync \
    cuMemFreeAsync cuMemMapArrayAsync cuMemPrefetchAsync cuMemPrefetchAsync_v2 cuMemPrefetchBatchAsync \
    cuMemcpy2DAsync_v2 cuMemcpy3DAsync_v2 cuMemcpy3DBatchAsync cuMemcpy3DBatchAsync_v2 cuMemcpy3DPeerAsync \
    cuMemcpy3DWithAttributesAsync cuMemcpyAsync cuMemcpyAtoHAsync_v2 cuMemcpyBatchAsync cuMemcpyBatchAsync_v2 \
    cuMemcpyDtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyHtoAAsync_v2 cuMemcpyHtoDAsync_v2 cuMemcpyPeerAsync \
    cuMemcpyWithAttributesAsync cuMemsetD16Async cuMemsetD2D16Async cuMemsetD2D32Async cuMemsetD2D8Async \
    cuMemsetD32Async cuMemsetD8Async cuSignalExternalSemaphoresAsync cuStreamAddCallback cuStreamAttachMemAsync \
    cuStreamBatchMemOp cuStreamBatchMemOp_v2 cuStreamBeginCaptureToCig cuStreamBeginCaptureToGraph \
    cuStreamBeginCapture_v2 cuStreamBeginRecaptureToGraph cuStreamCopyAttributes cuStreamDestroy_v2 \
    cuStreamEndCapture cuStreamEndCaptureToCig cuStreamQuery cuStreamSetAttribute cuStreamSynchronize \
    cuStreamWaitEvent cuStreamWaitValue32 cuStreamWaitValue32_v2 cuStreamWaitValue64 cuStreamWaitValue64_v2 \
    cuStreamWriteValue32 cuStreamWriteValue32_v2 cuStreamWriteValue64 cuStreamWriteValue64_v2 \
    cuWaitExternalSemaphoresAsync cuFabricCpyBatchAsync";
/// Of graphics: some use the default stream and are given none.
const OF_GRAPHICS: &str = "\
    cuGLMapBufferObject_v2 cuGLMapBufferObjectAsync_v2 cuGLUnmapBufferObject cuGLUnmapBufferObjectAsync \
    cuEGLStreamConsumerAcquireFrame cuEGLStreamConsumerReleaseFrame cuEGLStreamProducerPresentFrame \
    cuEGLStreamProducerReturnFrame";
/// They only answer, or are about a capture.
const ASK_ONLY: &str = "\
    cuStreamGetAttribute cuStreamGetCaptureInfo cuStreamGetCaptureInfo_v2 cuStreamGetCaptureInfo_v3 cuStreamGetCtx \
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
    /// What names stand for: a function, or its variant for threads with default streams of their own.
    renamed: Vec<(String, String)>,
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
        let names = header.lines().filter_map(|line| line.trim_start().strip_prefix("#define cu"));
        for (name, target) in names.filter_map(|line| line.split_once(char::is_whitespace)) {
            let (target, suffix) = match target.trim().split_once('(') {
                Some(("__CUDA_API_PTSZ", target)) => (target.trim_end_matches(')'), "_ptsz"),
                Some(("__CUDA_API_PTDS", target)) => (target.trim_end_matches(')'), "_ptds"),
                Some(_) => continue,
                None => (target.trim(), ""),
            };
            let name = format!("cu{name}");
            if target.starts_with("cu") && name != target {
                found.renamed.push((name.clone(), target.to_owned()));
            }
            if target.starts_with("cu") && !suffix.is_empty() {
                found.of_streams.insert(target.to_owned() + suffix);
            }
        }
        found
    }

    /// Those that the table should have.
    fn missing(&self) -> Vec<&str> {
        let renamed = self.renamed.iter().filter(|(name, _)| self.of_streams.contains(name));
        let all = self.of_streams.iter().chain(renamed.map(|(_, target)| target));
        let missing: BTreeSet<&str> =
            all.map(String::as_str).filter(|name| !is_fine(name)).collect();
        missing.into_iter().collect()
    }
}

/// A function's name without version and `_ptsz`.
fn base(name: &str) -> &str {
    let name = name.trim_end_matches("_ptsz").trim_end_matches("_ptds");
    let (base, version) = name.rsplit_once("_v").unwrap_or((name, "x"));
    if version.bytes().all(|byte| byte.is_ascii_digit()) { base } else { name }
}

fn is_of(list: &str, name: &str) -> bool {
    list.split_whitespace().any(|one| one == name)
}

fn is_in_table(name: &str) -> bool {
    table::set(ENTRY_POINTS);
    table::exact(name.as_bytes()).is_some()
}

fn is_fine(name: &str) -> bool {
    is_of(ASK_ONLY, name.trim_end_matches("_ptsz")) || is_of(OLD, name) || is_in_table(name)
}

#[test]
fn what_used_a_stream_is_replaced() {
    let all = OF_STREAMS.split_whitespace().chain(OF_GRAPHICS.split_whitespace());
    let missing: Vec<_> = all.filter(|name| !is_in_table(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    let asking: Vec<_> = ASK_ONLY.split_whitespace().filter(|name| is_in_table(name)).collect();
    assert!(asking.is_empty(), "they are not to be replaced: {asking:?}");
    // A thread that has a default stream of its own calls another function.
    let is_shared = |name: &&str| !is_in_table(&format!("{name}_ptsz"));
    let shared: Vec<_> = OF_STREAMS.split_whitespace().filter(is_shared).collect();
    let expected = [
        "cuLaunch",
        "cuLaunchGrid",
        "cuLaunchCooperativeKernelMultiDevice",
        "cuLaunchGridAsync",
        "cuStreamDestroy_v2",
    ];
    assert_eq!(shared, expected);
}

#[test]
fn declarations_are_read() {
    let header = "#define cuG __CUDA_API_PTSZ(cuG)\n#define __CUDA_API_PTDS(api) api ## _ptds\n\
        #define cuStreamDestroy cuStreamDestroy_v9\n#define cuMemAlloc cuMemAlloc_v9\n\
        CUresult CUDAAPI cuStreamDestroy(CUstream a);\n\
        CUresult CUDAAPI cuA(CUstream a); /* CUresult CUDAAPI cuB(CUstream a); */\n\
        typedef CUresult (CUDAAPI *pfn)(CUstream a);\n\
        CUresult CUDAAPI cuC(CUstream *a, CUstreamCaptureMode b); // CUresult CUDAAPI cuD(CUstream a);\n\
        CUresult CUDAAPI\ncuE(int a,\n    CUstream b);\nCUresult CUDAAPI cuLaunchF(const CUlaunchConfig *a);\n\
        CUresult CUDAAPI cuStreamQuery(CUstream a);\n";
    let functions = Functions::of(header, false);
    let all: Vec<&str> = functions.all.iter().map(String::as_str).collect();
    assert_eq!(all, ["cuA", "cuC", "cuE", "cuLaunchF", "cuStreamDestroy", "cuStreamQuery"]);
    let missing = ["cuA", "cuE", "cuG_ptsz", "cuLaunchF", "cuStreamDestroy_v9"];
    assert_eq!(functions.missing(), missing);
    assert!(Functions::of(header, true).missing().contains(&"cuC"));
}

#[test]
#[ignore = "needs NVIDIA's headers: cargo xtask test cuda"]
fn whatever_uses_a_stream_is_replaced() {
    let header = std::env::var("TALLY_CUDA_HEADER").expect("TALLY_CUDA_HEADER is cuda.h");
    for (name, least, by_pointer) in HEADERS {
        let path = std::path::Path::new(&header).with_file_name(name);
        let text = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let functions = Functions::of(&String::from_utf8_lossy(&text), by_pointer);
        assert!(functions.all.len() >= least, "{name}: {} functions", functions.all.len());
        let missing = functions.missing();
        assert!(missing.is_empty(), "{name}: not in the table of entry points: {missing:?}");
        let unknown: Vec<_> =
            functions.all.iter().filter(|one| !known::is_known(base(one).as_bytes())).collect();
        assert!(unknown.is_empty(), "{name}: not in core/shim/src/known.txt: {unknown:?}");
        if name == "cuda.h" {
            let version = format!("#define CUDA_VERSION {}", known::CUDA_VERSION);
            assert!(
                text.windows(version.len()).any(|part| part == version.as_bytes()),
                "{version}"
            );
        }
        println!(
            "{name}: {} functions, {} of streams",
            functions.all.len(),
            functions.of_streams.len()
        );
    }
}
