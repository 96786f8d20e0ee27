//! Which GPU a core serves. Clients report it, and whoever connects first must not make the core take another's
//! measurements for this GPU's: a report counts if its client is trusted, or if the driver lists that GPU.

use crate::profile_store::profiled::Device;
use std::path::Path;
use std::sync::Arc;
use tally_ipc::layout::Report;

const FOLDER: &str = "/proc/driver/nvidia/gpus";
/// GPUs looked at; machines have sixteen.
const GPUS_MAX: usize = 64;

/// UUIDs of the machine's GPUs, as [`Device`] has them. None where the driver lists none.
#[derive(Debug, Default)]
pub struct Gpus(Vec<[u64; 2]>);

impl Gpus {
    /// Lists the GPUs that the machine has now.
    pub fn listed() -> Self {
        Self::below(Path::new(FOLDER))
    }

    fn below(folder: &Path) -> Self {
        let folders = std::fs::read_dir(folder).into_iter().flatten().flatten().take(GPUS_MAX);
        let texts =
            folders.filter_map(|gpu| std::fs::read_to_string(gpu.path().join("information")).ok());
        Gpus(texts.filter_map(|text| uuid_in(&text)).collect())
    }
}

/// `GPU UUID: GPU-00112233-4455-6677-8899-aabbccddeeff` among other lines.
fn uuid_in(information: &str) -> Option<[u64; 2]> {
    let line = information.lines().find_map(|line| line.strip_prefix("GPU UUID:"))?;
    let digits: String = line.trim().strip_prefix("GPU-")?.split('-').collect();
    let all = (digits.len() == 32).then(|| u128::from_str_radix(&digits, 16).ok())??;
    let bytes = all.to_be_bytes();
    let half = |at: usize| bytes[at..at + 8].try_into().map(u64::from_le_bytes).unwrap_or_default();
    Some([half(0), half(8)])
}

/// Which GPUs a client may claim to use.
#[derive(Clone, Debug, Default)]
pub struct Witness {
    /// The client's word counts for any GPU.
    pub is_trusted: bool,
    /// The GPUs that count if the client is not trusted.
    pub gpus: Arc<Gpus>,
}

impl Witness {
    /// The GPU that a client reports, if that counts.
    pub fn device(&self, report: &Report) -> Option<Device> {
        Device::of(report).filter(|device| self.is_trusted || self.gpus.0.contains(&device.uuid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    const INFORMATION: &str = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 100\n\
        GPU UUID: \t GPU-00112233-4455-6677-8899-aabbccddeeff\nVideo BIOS: \t 96.00\n";
    const UUID: [u64; 2] = [0x7766_5544_3322_1100, 0xffee_ddcc_bbaa_9988];

    #[test]
    fn a_strangers_word_counts_for_gpus_that_the_driver_lists() {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [("0000:01:00.0", INFORMATION), ("0000:02:00.0", "GPU UUID: GPU-?\n")] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
            std::fs::write(folder.path().join(name).join("information"), text).unwrap();
        }
        let gpus = Arc::new(Gpus::below(folder.path()));
        assert_eq!(gpus.0, [UUID]);
        assert!(Gpus::below(&folder.path().join("none")).0.is_empty());
        let (_fd, region) = tally_ipc::map::create_client().unwrap();
        let report = &region.report;
        report.sm_count.store(132, Relaxed);
        let stranger = Witness { is_trusted: false, gpus: gpus.clone() };
        let trusted = Witness { is_trusted: true, gpus };
        for (uuid, counts) in [(UUID, true), ([1, 2], false)] {
            report.device_uuid[0].store(uuid[0], Relaxed);
            report.device_uuid[1].store(uuid[1], Relaxed);
            assert_eq!(stranger.device(report).is_some(), counts);
            assert!(trusted.device(report).is_some());
        }
    }
}
