//! A kernel in the status: its times, its forms, whether it can be transformed.

use crate::dispatch::snapshot::KernelNumbers;
use tally_admin::{Form, FormStatus, KernelStatus};
use tally_engine::policy;
use tally_engine::profile::{FormStats, Transformation};

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

fn form((form, argument, stats): &(policy::Form, u32, FormStats)) -> FormStatus {
    FormStatus {
        form: match form {
            policy::Form::Whole => Form::Whole,
            policy::Form::Sliced => Form::Sliced,
            policy::Form::Preemptible => Form::Preemptible,
            policy::Form::SmLimited => Form::SmLimited,
        },
        argument: *argument,
        measured: stats.count,
        mean_us: stats.mean_ns as f64 / 1e3,
        turnaround_us: stats.turnaround_ns() as f64 / 1e3,
    }
}

pub fn kernel(k: KernelNumbers) -> KernelStatus {
    KernelStatus {
        name: k.name,
        image: image_text(k.image),
        grid: k.grid,
        block: k.block,
        measured: k.count,
        mean_us: k.mean_ns as f64 / 1e3,
        p99_us: k.p99_ns as f64 / 1e3,
        contended: k.contended,
        blocks_per_sm: k.demand.blocks_per_sm,
        registers: k.demand.registers,
        waves: k.waves_permille as f64 / 1e3,
        transformed: transform_text(k.transformation),
        forms: k.forms.iter().map(form).collect(),
    }
}
