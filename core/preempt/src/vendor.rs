//! Which code belongs to NVIDIA's closed libraries. Their licences forbid modifying
//! it, so it is left alone unless the operator says otherwise.
//!
//! A kernel is recognised by the library that holds its image, by the library whose code loaded an image from
//! memory, or by a name that only those libraries use. A kernel that is not recognised would be transformed
//! although the switch is off; a kernel that is taken for theirs by mistake runs whole. The lists err on the
//! second side.

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

/// Starts of their kernels' names.
const NAMES: [&str; 24] = [
    "ampere_",
    "cask",
    "cublas",
    "cudnn",
    "cusolver",
    "cusparse",
    "cutlass_",
    "dot_kernel",
    "gemmk1_",
    "gemmsn_",
    "gemv",
    "hopper_",
    "implicit_",
    "maxwell_",
    "nvjet_",
    "sm50_",
    "sm70_",
    "sm75_",
    "sm80_",
    "sm86_",
    "sm89_",
    "sm90_",
    "turing_",
    "volta_",
];

/// Parts of their kernels' mangled names.
const PARTS: [&str; 13] = [
    "2cublas",
    "7cutlass7Kernel2I",
    "5cudnn",
    "6cublas",
    "8cublasLt",
    "cublasLt",
    "cudnn",
    "gemmSN",
    "gemvNSP",
    "internal5gemv",
    "splitKreduce_kernel",
    "xmma",
    "cusolver",
];

/// Whether a kernel is theirs: by its name, and by the library of its image, if that
/// is known.
pub fn is_vendor(name: &str, library: Option<&str>) -> bool {
    let theirs = |library: &str| LIBRARIES.iter().any(|l| library.starts_with(l));
    library.is_some_and(theirs)
        || NAMES.iter().any(|n| name.starts_with(n))
        || PARTS.iter().any(|p| name.contains(p))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn their_libraries_and_kernels_are_known_and_others_are_not_taken_for_theirs() {
        assert!(is_vendor("anything", Some("libcublasLt.so.13")));
        assert!(is_vendor("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", None));
        assert!(is_vendor("cutlass_75_tensorop_bf16_s1688gemm_bf16_128x64_nn_align1", None));
        assert!(is_vendor("sm90_xmma_fprop_implicit_gemm_indexed_tf32f32", None));
        let kernel2 = "_ZN7cutlass7Kernel2I57cutlass_75_tensorop_bf16_s1688gemm_bf16";
        assert!(is_vendor(kernel2, None));
        assert!(is_vendor("_ZN8cublasLt19splitKreduce_kernelILi32ELi16E", None));
        assert!(!is_vendor("_ZN2at6native18elementwise_kernelI", Some("libtorch_cuda.so")));
        assert!(!is_vendor("triton_poi_fused_add_0", None));
        assert!(!is_vendor("_ZN7cutlass6KernelI", None));
        assert!(!is_vendor("matmul", None));
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
    fn every_entry_of_the_lists_counts() {
        for library in LIBRARIES {
            assert!(is_vendor("matmul", Some(&format!("{library}.so.1"))), "{library}");
        }
        for name in NAMES {
            assert!(is_vendor(&format!("{name}x"), None), "{name}");
        }
        for part in PARTS {
            assert!(is_vendor(&format!("_ZN1a{part}1b"), None), "{part}");
        }
    }
}
