//! Which GPU a core serves. Clients report it, as the driver told their shims, and whoever connects first must not make
//! the core take another's measurements for this GPU's: a report decides if its client is trusted, or if the driver
//! lists that GPU as the only one that the core's `CUDA_VISIBLE_DEVICES` leaves.

use crate::profile_store::profiled::Device;
use std::path::Path;
use std::sync::Arc;
use tally_ipc::layout::Report;

const FOLDER: &str = "/proc/driver/nvidia/gpus";
/// GPUs looked at; machines have sixteen.
const GPUS_MAX: usize = 64;

/// A GPU that the driver lists.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Gpu {
    /// As [`Device`] has it.
    uuid: [u64; 2],
    /// Its UUID in lower case, after `GPU-`.
    name: String,
    model: String,
}

/// GPUs of the machine that this core may serve. None where the driver lists none.
#[derive(Debug, Default)]
pub struct Gpus(Vec<Gpu>);

impl Gpus {
    /// Lists the GPUs that the machine has now, without those that the environment hides from CUDA.
    pub fn listed() -> Self {
        let variable = |name: &str| std::env::var(name).ok();
        let (visible, order) = (variable("CUDA_VISIBLE_DEVICES"), variable("CUDA_DEVICE_ORDER"));
        Self::below(Path::new(FOLDER)).visible(visible.as_deref(), order.as_deref())
    }

    /// In the order of their bus addresses.
    fn below(folder: &Path) -> Self {
        let folders = std::fs::read_dir(folder).into_iter().flatten().flatten().take(GPUS_MAX);
        let mut folders: Vec<_> = folders.map(|gpu| gpu.path()).collect();
        folders.sort();
        let texts =
            folders.iter().filter_map(|gpu| std::fs::read_to_string(gpu.join("information")).ok());
        Gpus(texts.filter_map(|text| gpu_in(&text)).collect())
    }

    /// What `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` leave. Where that cannot be told without CUDA, all.
    fn visible(self, visible: Option<&str>, order: Option<&str>) -> Self {
        let Some(visible) = visible else { return self };
        // Numbers go by speed otherwise.
        let is_in_order = order == Some("PCI_BUS_ID")
            || self.0.windows(2).all(|pair| pair[0].model == pair[1].model);
        let mut left = Vec::new();
        for entry in visible.split(',').map(str::trim) {
            let named: Vec<&Gpu> = match entry.strip_prefix("GPU-") {
                Some(name) => {
                    let name = name.to_ascii_lowercase();
                    self.0.iter().filter(|gpu| gpu.name.starts_with(&name)).collect()
                }
                None => match entry.parse::<usize>() {
                    Ok(_) if !is_in_order => return self,
                    Ok(number) => self.0.get(number).into_iter().collect(),
                    Err(_) if entry.starts_with("MIG-") => return self,
                    Err(_) => Vec::new(),
                },
            };
            // CUDA takes the entries before the first that names no GPU, or several.
            let [gpu] = named[..] else { break };
            left.push(gpu.clone());
        }
        Gpus(left)
    }

    /// Whether this is the only one.
    fn is_only(&self, uuid: [u64; 2]) -> bool {
        matches!(&self.0[..], [gpu] if gpu.uuid == uuid)
    }
}

/// `GPU UUID: GPU-00112233-4455-6677-8899-aabbccddeeff` among other lines.
fn gpu_in(information: &str) -> Option<Gpu> {
    let after = |key: &str| information.lines().find_map(|line| line.strip_prefix(key));
    let name = after("GPU UUID:")?.trim().strip_prefix("GPU-")?.to_ascii_lowercase();
    let digits: String = name.split('-').collect();
    let all = (digits.len() == 32).then(|| u128::from_str_radix(&digits, 16).ok())??;
    let bytes = all.to_be_bytes();
    let half = |at: usize| bytes[at..at + 8].try_into().map(u64::from_le_bytes).unwrap_or_default();
    let model = after("Model:").unwrap_or_default().trim().to_owned();
    Some(Gpu { uuid: [half(0), half(8)], name, model })
}

/// Which GPUs a client may claim to use.
#[derive(Clone, Debug, Default)]
pub struct Witness {
    /// The client's word counts for any GPU.
    pub is_trusted: bool,
    /// The GPUs that this core may serve.
    pub gpus: Arc<Gpus>,
}

/// The GPU that a client reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    pub device: Device,
    /// The core may take it for the GPU that it serves. Otherwise it counts only if it is that one.
    pub decides: bool,
}

impl Witness {
    /// The GPU that a client reports, if it reports one.
    pub fn named(&self, report: &Report) -> Option<Named> {
        let device = Device::of(report)?;
        let decides = self.is_trusted || self.gpus.is_only(device.uuid);
        Some(Named { device, decides })
    }

    /// The same, if the core may take it for the GPU that it serves.
    pub fn device(&self, report: &Report) -> Option<Device> {
        self.named(report).filter(|named| named.decides).map(|named| named.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    const ONE: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";
    const OTHER: &str = "GPU-01112233-4455-6677-8899-aabbccddeeff";
    const UUID: [u64; 2] = [0x7766_5544_3322_1100, 0xffee_ddcc_bbaa_9988];
    const UUID_OF_OTHER: [u64; 2] = [0x7766_5544_3322_1101, 0xffee_ddcc_bbaa_9988];

    /// A folder as the driver makes it: the other GPU has the lower bus address.
    fn folder(models: [&str; 2]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let gpus = [("0000:81:00.0", models[1], ONE), ("0000:02:00.0", models[0], OTHER)];
        let broken = ("0000:03:00.0", "NVIDIA H200", "GPU-?");
        for (address, model, uuid) in gpus.into_iter().chain([broken]) {
            let text = format!(
                "Model: \t\t {model}\nIRQ:   \t\t 100\nGPU UUID: \t {uuid}\nVideo BIOS: \t 96.00\n"
            );
            std::fs::create_dir(folder.path().join(address)).unwrap();
            std::fs::write(folder.path().join(address).join("information"), text).unwrap();
        }
        folder
    }

    fn visible(models: [&str; 2], devices: Option<&str>, order: Option<&str>) -> Vec<[u64; 2]> {
        let gpus = Gpus::below(folder(models).path()).visible(devices, order);
        gpus.0.into_iter().map(|gpu| gpu.uuid).collect()
    }

    #[test]
    fn the_environment_of_the_core_says_which_of_several_gpus_it_may_serve() {
        let (alike, both) = (["NVIDIA H200"; 2], [UUID_OF_OTHER, UUID]);
        let mixed = ["NVIDIA T4", "NVIDIA H200"];
        assert_eq!(visible(alike, None, None), both);
        assert_eq!(visible(alike, Some("0"), None), [UUID_OF_OTHER]);
        assert_eq!(visible(alike, Some("1"), None), [UUID]);
        assert_eq!(visible(alike, Some("1,0"), None), [UUID, UUID_OF_OTHER]);
        assert_eq!(visible(alike, Some(" GPU-00112233 "), None), [UUID]);
        assert_eq!(
            visible(alike, Some("GPU-01112233-4455-6677-8899-AABBCCDDEEFF"), None),
            [UUID_OF_OTHER]
        );
        // Several are named, or none.
        assert!(visible(alike, Some("GPU-0"), None).is_empty());
        assert!(
            visible(alike, Some(""), None).is_empty()
                && visible(alike, Some("-1"), None).is_empty()
        );
        assert_eq!(visible(alike, Some("1,-1,0"), None), [UUID]);
        // By speed: which is 0 only CUDA knows.
        assert_eq!(visible(mixed, Some("0"), None), both);
        assert_eq!(visible(mixed, Some("0"), Some("FASTEST_FIRST")), both);
        assert_eq!(visible(mixed, Some("0"), Some("PCI_BUS_ID")), [UUID_OF_OTHER]);
        assert_eq!(visible(mixed, Some(ONE), None), [UUID]);
        assert_eq!(visible(alike, Some("MIG-00112233"), None), both);
        assert!(Gpus::below(Path::new("/nonexistent")).0.is_empty());
    }

    #[test]
    fn a_strangers_word_decides_only_where_one_gpu_is_left() {
        let folder = folder(["NVIDIA H200"; 2]);
        let gpus = |devices| Arc::new(Gpus::below(folder.path()).visible(devices, None));
        let (_fd, region) = tally_ipc::map::create_client().unwrap();
        let report = &region.report;
        report.sm_count.store(132, Relaxed);
        let decides = |is_trusted, devices, uuid: [u64; 2]| {
            report.device_uuid[0].store(uuid[0], Relaxed);
            report.device_uuid[1].store(uuid[1], Relaxed);
            let witness = Witness { is_trusted, gpus: gpus(devices) };
            assert_eq!(witness.named(report).unwrap().device.uuid, uuid);
            witness.device(report).is_some()
        };
        // Either could be the core's.
        assert!(!decides(false, None, UUID) && !decides(false, None, UUID_OF_OTHER));
        assert!(decides(false, Some("1"), UUID) && !decides(false, Some("1"), UUID_OF_OTHER));
        assert!(decides(false, Some("0"), UUID_OF_OTHER) && !decides(false, Some("0"), UUID));
        assert!(!decides(false, Some("1"), [1, 2]) && !decides(false, Some(""), UUID));
        assert!(decides(true, None, UUID) && decides(true, Some("0"), [1, 2]));
    }
}
