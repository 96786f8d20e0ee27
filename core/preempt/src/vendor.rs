//! Which code belongs to NVIDIA's closed libraries.
//!
//! Two questions, which err on opposite sides:
//! - Is a kernel left as it is ([`is_vendor`])? The libraries' licences forbid modifying their code. A kernel is
//!   recognised by the library that holds its image, by the library whose code loaded an image from memory, or, linked
//!   into a program, by a name that only they use. Where no library is known, names that others use as well count, too.
//!   A kernel taken for theirs by mistake runs whole.
//! - May a kernel be SM-limited although nobody has read its code ([`may_be_limited_unread`])? Here only the library
//!   counts, and only one that is known by its whole name: a program gives its own kernels any name.

/// Starts of file names of the libraries.
const LIBRARIES: [&str; 14] = [
    "libcublas",
    "libcudnn",
    "libcufft",
    "libcurand",
    "libcusolver",
    "libcusparse",
    "libcuda.",
    "libnccl",
    "libnpp",
    "libnvinfer",
    "libnvjpeg",
    "libnvrtc",
    "libnvshmem",
    "libcutensor",
];

/// File names, up to the version, of those whose kernels do not wait for blocks that may not run beside them, nor for
/// other GPUs, and do not ask for their SM, as far as is known without reading them.
const LIMITED_UNREAD: [&str; 17] = [
    "libcublas.so",
    "libcublasLt.so",
    "libcudnn.so",
    "libcudnn_adv.so",
    "libcudnn_cnn.so",
    "libcudnn_engines_precompiled.so",
    "libcudnn_engines_runtime_compiled.so",
    "libcudnn_engines_tensor_ir.so",
    "libcudnn_ext.so",
    "libcudnn_graph.so",
    "libcudnn_heuristic.so",
    "libcudnn_ops.so",
    "libcufft.so",
    "libcurand.so",
    "libcusolver.so",
    "libcusparse.so",
    "libcusparseLt.so",
];

/// Starts of their kernels' names.
const NAMES: [&str; 7] = ["ampere_", "cask", "cusparse", "maxwell_", "nvjet_", "turing_", "volta_"];

/// Starts of names that kernels of theirs and of others have.
const SHARED_NAMES: [&str; 14] = [
    "cutlass_",
    "dot_kernel",
    "gemmk1_",
    "gemmsn_",
    "gemv",
    "hopper_",
    "implicit_",
    "sm50_",
    "sm70_",
    "sm75_",
    "sm80_",
    "sm86_",
    "sm89_",
    "sm90_",
];

/// A part of mangled names that theirs and others have: CUTLASS is open.
const SHARED_PART: &str = "7cutlass7Kernel2I";

/// Parts of their kernels' mangled names. Those of generic name, such as cuBLAS's `dot_kernel` and `gemv`, have
/// parameters of these types.
const PARTS: [&str; 8] = [
    "cublas",
    "cudnn",
    "cusolver",
    "gemmSN",
    "gemvNSP",
    "internal5gemv",
    "splitKreduce_kernel",
    "xmma",
];

/// Whether a kernel is theirs: by its name, and by the library of its image, if that
/// is known.
pub fn is_vendor(name: &str, library: Option<&str>) -> bool {
    let theirs = |library: &str| LIBRARIES.iter().any(|l| library.starts_with(l));
    let shared = || SHARED_NAMES.iter().any(|n| name.starts_with(n)) || name.contains(SHARED_PART);
    library.map_or_else(shared, theirs)
        || NAMES.iter().any(|n| name.starts_with(n))
        || PARTS.iter().any(|p| name.contains(p))
}

/// Whether kernels of a library may be SM-limited although their code was not read.
pub fn may_be_limited_unread(library: &str) -> bool {
    LIMITED_UNREAD.iter().any(|known| {
        let version = library.strip_prefix(known);
        version.is_some_and(|version| version.is_empty() || version.starts_with('.'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn their_libraries_and_kernels_are_known_and_others_are_not_taken_for_theirs() {
        assert!(is_vendor("anything", Some("libcublasLt.so.13")));
        assert!(is_vendor("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", None));
        assert!(is_vendor("sm90_xmma_fprop_implicit_gemm_indexed_tf32f32", None));
        let gemv = "_Z17gemv2T_kernel_valIiiffffLi128ELi16ELi4ELi4ELb0ELb0E18cublasGemvParamsEx";
        assert!(is_vendor(gemv, None));
        assert!(is_vendor("_ZN8cublasLt19splitKreduce_kernelILi32ELi16E", None));
        assert!(!is_vendor("_ZN2at6native18elementwise_kernelI", Some("libtorch_cuda.so")));
        assert!(!is_vendor("triton_poi_fused_add_0", None));
        // CUTLASS is open, and programs have kernels of generic names.
        let open = [
            "_ZN7cutlass6KernelI",
            "_ZN7cutlass7Kernel2I57cutlass_75_tensorop_bf16_s1688gemm_bf16",
            "cutlass_80_tensorop_s1688gemm_128x128_nn_align4",
            "gemv_mine",
            "dot_kernel",
            "hopper_gemm",
            "matmul",
        ];
        for own in open {
            for library in ["", "libtorch_cuda.so"] {
                assert!(!is_vendor(own, Some(library)), "{own} of {library}");
            }
            assert!(is_vendor(own, Some("libcublas.so.12")), "{own}");
        }
        let unknown = open.map(|own| is_vendor(own, None));
        assert_eq!(unknown, [false, true, true, true, true, true, false]);
        // A library counts by the start of its file name, wherever its kernels come from.
        for theirs in ["libcudnn_ops.so.9", "libcusparse.so.12", "libnccl.so.2", "libcuda.so.1"] {
            assert!(is_vendor("matmul", Some(theirs)), "{theirs}");
        }
        for others in ["libcudart.so.13", "libmy_cublas.so", "python3.12", ""] {
            assert!(!is_vendor("matmul", Some(others)), "{others}");
        }
        assert!(is_vendor("cublas_anything", Some("libmine.so")), "a name is enough");
        assert!(!is_vendor("", None));
    }

    #[test]
    fn only_a_known_library_s_kernels_are_limited_unread() {
        for known in LIMITED_UNREAD {
            for name in [known.to_owned(), format!("{known}.13"), format!("{known}.12.6.4")] {
                assert!(may_be_limited_unread(&name) && is_vendor("matmul", Some(&name)), "{name}");
            }
        }
        let others = [
            "",
            "libtorch_cuda.so",
            "libcublas_of_mine.so",
            "libcublas.sox",
            "mylibcublas.so",
            "libnccl.so.2",
            "libnvshmem_host.so.3",
            "libcuda.so.1",
        ];
        for other in others {
            assert!(!may_be_limited_unread(other), "{other}");
        }
    }

    #[test]
    fn every_entry_of_the_lists_counts() {
        for library in LIBRARIES {
            assert!(is_vendor("matmul", Some(&format!("{library}.so.1"))), "{library}");
        }
        for name in NAMES {
            assert!(is_vendor(&format!("{name}x"), Some("libmine.so")), "{name}");
        }
        for part in PARTS {
            assert!(is_vendor(&format!("_ZN1a{part}1b"), Some("libmine.so")), "{part}");
        }
        for name in SHARED_NAMES {
            assert!(is_vendor(&format!("{name}x"), None), "{name}");
        }
    }
}
