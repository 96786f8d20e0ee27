//! What is told by its name: kernels that wait, for one another's blocks or for other GPUs, and constants.
//!
//! A kernel whose blocks wait for each other may hang when some of them are held back, and neither its PTX nor
//! its machine code says so plainly: a look-back reads a word that another block writes, as any kernel might.
//! But the libraries that do it use known names. A name proves nothing, so kernels that are not found here are
//! still watched when they are transformed ([`TransformRefusal::BlocksWaited`]).

use crate::TransformRefusal;

/// Parts of names of libraries that talk to other GPUs. A kernel of theirs holds up its
/// peers.
const COMMUNICATION: [&str; 13] = [
    "ncclDevKernel",
    "ncclKernel",
    "ncclSymDevKernel",
    "ncclSymkDevKernel",
    "nvshmem",
    "rcclKernel",
    "deep_ep",
    "cross_device_reduce",
    "all_reduce",
    "allreduce",
    "AllReduce",
    "all_gather",
    "reduce_scatter",
];

/// CUB's and Thrust's kernels in which a tile looks back at those before it: scans, and
/// what is built on them. Last, other compilers' scans.
const LOOK_BACK: [&str; 18] = [
    "DeviceScan",
    "DeviceSelect",
    "DevicePartition",
    "DeviceReduceByKey",
    "DeviceRunLength",
    "DeviceRle",
    "DeviceUniqueByKey",
    "DeviceThreeWayPartition",
    "Onesweep",
    "OneSweep",
    "LookBack",
    "Lookback",
    "look_back",
    "lookback",
    "BatchMemcpy",
    "cumsum",
    "cumprod",
    "triton_spl_",
];

/// Other kernels whose blocks wait: for a partial sum of the same tile, or for a whole
/// grid.
const SEMAPHORES: [&str; 11] = [
    "StreamK",
    "stream_k",
    "streamk",
    "Stream_K",
    "SplitKSerial",
    "split_k_serial",
    "splitk_serial",
    "SplitkSemaphore",
    "grid_barrier",
    "GridBarrier",
    "cooperative_groups",
];

/// Tables of CUDA's mathematical functions (the digits of 2/pi, coefficients), with
/// their sizes: constants, under names that are the implementation's own.
pub const MATH_TABLES: [(&str, u64); 3] =
    [("__cudart_i2opi_f", 24), ("__cudart_i2opi_d", 144), ("__cudart_sin_cos_coeffs", 128)];

/// Whether a variable of this name may be one that [`MATH_TABLES`] or the name of a text make a constant, so that
/// kernels that read it are transformed. Then they must not be any more if a program may write it.
pub fn may_be_constant(name: &[u8]) -> bool {
    name.starts_with(b"__cudart_") || std::str::from_utf8(name).is_ok_and(is_text)
}

/// The names that compilers, NVIDIA's and Triton's, give string literals and `__func__`.
pub(crate) fn is_text(name: &str) -> bool {
    const NUMBERED: [&str; 7] = [
        "$str$",
        "__unnamed_",
        "assertFile_",
        "assertFunc_",
        "assertMessage_",
        "printfFormat_",
        "printfPrefix_",
    ];
    let digits = |rest: &str| rest.bytes().all(|b| b.is_ascii_digit());
    name == "$str" || NUMBERED.iter().any(|prefix| name.strip_prefix(prefix).is_some_and(digits))
}

/// Why a kernel of this name, mangled or plain, is not transformed; `None` says nothing.
pub fn waits_by_name(name: &str) -> Option<TransformRefusal> {
    let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    if has(&COMMUNICATION) {
        return Some(TransformRefusal::Communication);
    }
    let waits = has(&LOOK_BACK) || has(&SEMAPHORES) || thrust_scan(name) || marlin(name);
    waits.then_some(TransformRefusal::BlocksWaitByName)
}

/// Thrust's own names: an agent in `cuda_cub`, named after what it does. In a plain
/// name, `__scan::`; mangled, `6__scan` with the length before it.
fn thrust_scan(name: &str) -> bool {
    let agents = [
        "__scan",
        "__scan_by_key",
        "__copy_if",
        "__partition",
        "__unique",
        "__reduce_by_key",
        "__set_operations",
    ];
    name.contains("thrust") && agents.iter().any(|agent| name.contains(agent))
}

/// Marlin's quantised matrix products: blocks that share a column pass partial sums to each other under locks.
fn marlin(name: &str) -> bool {
    let parts = ["Marlin", "marlin"];
    parts.iter().any(|part| name.contains(part)) && !name.contains("repack")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_are_known_and_variables_are_not() {
        let constants = MATH_TABLES.map(|(name, _)| name).into_iter();
        for name in constants.chain(["$str", "$str$12", "__unnamed_3"]) {
            assert!(may_be_constant(name.as_bytes()), "{name}");
        }
        for name in ["table", "_Z15__cudart_i2opi_f", "$string", "__unnamed_x", ""] {
            assert!(!may_be_constant(name.as_bytes()), "{name}");
        }
    }

    #[test]
    fn look_backs_and_semaphores_are_known() {
        for name in [
            "_ZN3cub17CUB_200200_800_NS16DeviceScanKernelINS0_16DeviceScanPolicyIiE9Policy800EPiS5_NS0_13ScanTileStateIiLb1EEENS0_8CubSumOpEEEvv",
            "void cub::CUB_200700_900_NS::DeviceScanKernel<cub::DeviceScanPolicy<long>::Policy600, const long *, long *>(T2, T3)",
            "_ZN3cub25DeviceSelectSweepKernelINS_16DispatchSelectIfE8PolicyEEvT_",
            "_ZN3cub23DeviceReduceByKeyKernelINS_24DispatchReduceByKeyIvEEEvT0_",
            "_ZN3cub31DeviceRadixSortOnesweepKernelINS_21DeviceRadixSortPolicyIhhjE9Policy900ELb0EEEvPT1_",
            "_ZN3cub28DeviceRunLengthEncodeKernelIvEEvT_",
            "_ZN3cub27DeviceUniqueByKeySweepKernelIvEEvT_",
            "_ZN3cub36DeviceThreeWayPartitionKernelIvEEvT_",
            "_ZN6thrust20THRUST_200302_800_NS8cuda_cub4core13_kernel_agentINS1_6__scan9ScanAgentIPliEEEEvT0_",
            "_ZN6thrust8cuda_cub4core13_kernel_agentINS0_9__copy_if11CopyIfAgentIPiS5_EEEEvT0_",
            "_ZN7cutlass6KernelINS_4gemm6kernel15GemmUniversalINS1_7StreamKEEEEEvNT_6ParamsE",
            "cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<PersistentTileSchedulerSm90StreamK>>",
            "_ZN7cutlass6KernelINS_4gemm6kernel17GemmSplitKSerialIvEEEEvNT_6ParamsE",
            "_ZN6marlin6MarlinI6__halfLi256ELi4EEEvPK4int4",
            "streamk_matmul_kernel_0d1d2d",
            "triton_spl_fused_cumsum_3",
        ] {
            assert_eq!(waits_by_name(name), Some(TransformRefusal::BlocksWaitByName), "{name}");
        }
    }

    #[test]
    fn communication_is_known() {
        for name in [
            "_Z47ncclDevKernel_AllReduce_Sum_f16_RING_LL_5000ILi1EEv20ncclDevKernelArgs",
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "_Z36ncclKernel_AllReduce_RING_LL_Sum_floatP12ncclWorkElem",
            "_Z15ncclKernel_MainILi16EEvP11ncclDevCommmP8ncclWork",
            "ncclSymDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_f16",
            "_ZN7nvshmem6kernel7barrierEv",
            "nvshmemi_proxy_quiet_entry",
            "_ZN4c10d12_GLOBAL__N_127one_shot_all_reduce_kernelIfEEvv",
            "_ZN4vllm26cross_device_reduce_1stageI6__halfLi2EEEvPNS_8RankDataE",
        ] {
            assert_eq!(waits_by_name(name), Some(TransformRefusal::Communication), "{name}");
        }
    }

    #[test]
    fn other_names_say_nothing() {
        for name in [
            "",
            "vector_add",
            "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_",
            "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_9ArgMaxOpsIfEEjlLi4EEEEEvT1_",
            "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
            "_ZN3cub18DeviceReduceKernelINS_18DeviceReducePolicyIfjNS_3SumEE9Policy600EEEvT0_",
            "_ZN3cub31DeviceRadixSortHistogramKernelINS_21DeviceRadixSortPolicyIhhjEEEEvPT1_",
            "ampere_sgemm_32x32_sliced1x4_tn",
            "cutlass_80_tensorop_s1688gemm_128x128_32x3_splitk_parallel_align4",
            "triton_poi_fused_add_0",
            "fused_selection_kernel",
            "_ZN4vllm6marlin20gptq_marlin_repack_kernelILi4EEEvPKj",
        ] {
            assert_eq!(waits_by_name(name), None, "{name}");
        }
    }
}
