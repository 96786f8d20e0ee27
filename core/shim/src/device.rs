//! What the core is told of the device.

use crate::state;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, Release, SeqCst};
use tally_preempt::cuda::{ATTRIBUTE_MPS_ENABLED, ATTRIBUTE_SM_COUNT, SUCCESS, driver};

static REPORTED: AtomicBool = AtomicBool::new(false);

/// Report the device of the first launch; `device` below 0 if unknown.
pub fn report(device: i32) {
    let Some(client) = state::client() else { return };
    if device < 0 || REPORTED.swap(true, SeqCst) {
        return;
    }
    let d = driver();
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: a valid out-pointer.
        let ok =
            d.device_attribute.is_some_and(|f| unsafe { f(&mut value, which, device) } == SUCCESS);
        ok.then_some(value)
    };
    let report = &client.report;
    if let Some(f) = d.device_uuid {
        let mut uuid = [0_u8; 16];
        // SAFETY: a valid out-pointer to 16 bytes.
        if unsafe { f(&mut uuid, device) } == SUCCESS {
            let (low, high) = uuid.split_at(8);
            for (word, half) in report.device_uuid.iter().zip([low, high]) {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(half);
                word.store(u64::from_le_bytes(bytes), Relaxed);
            }
        }
    }
    let mps = attribute(ATTRIBUTE_MPS_ENABLED).map_or(0, |v| if v != 0 { 1 } else { 2 });
    report.mps_client.store(mps, Relaxed);
    report.sm_count.store(attribute(ATTRIBUTE_SM_COUNT).unwrap_or(0).max(0) as u32, Release);
}

/// Only in a forked child.
pub fn reset() {
    REPORTED.store(false, SeqCst);
}
