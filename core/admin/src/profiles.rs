//! Answers about kernels and their profiles.

use crate::words::{required, words};
use serde::{Deserialize, Serialize};

/// The answer to [`Request::ProfilesShow`](crate::Request::ProfilesShow).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Profiles {
    pub store: ProfilesStatus,
    /// Kernels by measured GPU time, most first.
    pub kernels: Vec<KernelStatus>,
}

/// What is kept of kernels between runs of the core.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProfilesStatus {
    /// Where files are; `null` if nothing is kept.
    #[serde(deserialize_with = "required")]
    pub directory: Option<String>,
    /// This GPU's file; `null` while it is not known which GPU this is.
    #[serde(deserialize_with = "required")]
    pub file: Option<String>,
    /// Kernels (name, image, grid, block) kept for this GPU.
    pub kernels: usize,
    /// Kernels (name, image) that must not be transformed.
    pub whole_only: usize,
    /// When the file was written last in this run, seconds since the epoch.
    #[serde(deserialize_with = "required")]
    pub written_unix_s: Option<u64>,
    /// Why nothing, or not all, is kept.
    #[serde(deserialize_with = "required")]
    pub problem: Option<String>,
}

/// The answer to [`Request::ProfilesClear`](crate::Request::ProfilesClear).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cleared {
    /// Kernels of this run that were forgotten.
    pub kernels: u32,
    /// The file that was deleted, if there was one.
    #[serde(deserialize_with = "required")]
    pub file: Option<String>,
    /// It is not known yet which GPU this core serves: files in this folder were left.
    #[serde(deserialize_with = "required")]
    pub left_in: Option<String>,
}

/// A kernel's measured times.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KernelStatus {
    /// Symbol name; `graph:<nodes>` for a graph.
    pub name: String,
    /// First 8 hexadecimal digits of what identifies its code: tells kernels of one name and
    /// several images apart; empty if the image is unknown.
    pub image: String,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Launches measured (not all are).
    pub measured: u64,
    /// Mean GPU time, us.
    pub mean_us: f64,
    /// 99th percentile of the recent ones, us.
    pub p99_us: f64,
    /// It never ran alone: the times are upper bounds, the least measured beside other work.
    pub contended: bool,
    /// Blocks of it that one SM holds at once; 0: unknown.
    pub blocks_per_sm: u16,
    /// Registers of a thread; 0: unknown.
    pub registers: u16,
    /// How often its blocks fill all SMs; 0: unknown.
    pub waves: f64,
    /// Whether it can be transformed: `unknown`, `preparable`, `preparing`, `ready`, or
    /// `whole only: ` and why.
    pub transformed: String,
    /// Measured in forms other than whole.
    pub forms: Vec<FormStatus>,
}

words! {
    /// The form of a launch.
    pub enum Form {
        Whole = "whole",
        Sliced = "sliced",
        Preemptible = "preemptible",
        SmLimited = "sm-limited",
    }
}

/// A kernel in one form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FormStatus {
    pub form: Form,
    /// Blocks of a slice, or SMs.
    pub argument: u32,
    pub measured: u64,
    /// Mean GPU time, us.
    pub mean_us: f64,
    /// From being asked to yield until it had, median, us; 0: never.
    pub turnaround_us: f64,
}
