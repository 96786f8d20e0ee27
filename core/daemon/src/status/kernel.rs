//! A kernel in the status: its times, its forms, whether it can be transformed.

use serde::Serialize;
use tally_engine::policy::Form;
use tally_engine::profile::Transformation;

/// A kernel's measured times.
#[derive(Clone, Debug, Serialize)]
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
    /// Whether it can be transformed: `unknown`, `preparable`, `preparing`, `ready`, or
    /// `whole only: ` and why.
    pub transformed: String,
    /// Measured in forms other than whole.
    pub forms: Vec<FormStatus>,
}

/// A kernel in one form.
#[derive(Clone, Debug, Serialize)]
pub struct FormStatus {
    /// `sliced`, `preemptible` or `sm-limited`.
    pub form: &'static str,
    /// Blocks of a slice, or SMs.
    pub argument: u32,
    pub measured: u64,
    /// Mean GPU time, us.
    pub mean_us: f64,
    /// From being asked to yield until it had, median, us; 0: never.
    pub turnaround_us: f64,
}

fn transform_text(to: Transformation) -> String {
    match to {
        Transformation::Unknown => "unknown".into(),
        Transformation::Preparable => "preparable".into(),
        Transformation::Preparing => "preparing".into(),
        Transformation::Ready { .. } => "ready".into(),
        Transformation::WholeOnly(why) | Transformation::WholeHere(why) => {
            format!("whole only: {why}")
        }
    }
}

fn image_text(image: u128) -> String {
    if image == 0 { String::new() } else { format!("{:08x}", image >> 96) }
}

impl From<crate::dispatch::snapshot::KernelNumbers> for KernelStatus {
    fn from(k: crate::dispatch::snapshot::KernelNumbers) -> Self {
        KernelStatus {
            name: k.name,
            image: image_text(k.image),
            grid: k.grid,
            block: k.block,
            measured: k.count,
            mean_us: k.mean_ns as f64 / 1e3,
            p99_us: k.p99_ns as f64 / 1e3,
            contended: k.contended,
            transformed: transform_text(k.transformation),
            forms: k
                .forms
                .iter()
                .map(|(form, argument, stats)| FormStatus {
                    form: match form {
                        Form::Whole => "whole",
                        Form::Sliced => "sliced",
                        Form::Preemptible => "preemptible",
                        Form::SmLimited => "sm-limited",
                    },
                    argument: *argument,
                    measured: stats.count,
                    mean_us: stats.mean_ns as f64 / 1e3,
                    turnaround_us: stats.turnaround_ns() as f64 / 1e3,
                })
                .collect(),
        }
    }
}
