//! What the shim counts in this process, where there is one: the region that it shares with the core.

use std::fs::read_to_string;
use std::sync::atomic::Ordering::SeqCst;
use tally_ipc::ClientRegion;
use tally_ipc::layout::transform_state;
use tally_ipc::map::Region;

/// The region that the shim has mapped; it stays mapped. `None`: this process is no client.
pub fn of_shim() -> Option<&'static ClientRegion> {
    let maps = read_to_string("/proc/self/maps").ok()?;
    let file = format!("/memfd:{}", ClientRegion::NAME);
    let line = maps.lines().find(|line| line.contains(&file))?;
    let (start, rest) = line.split_once('-')?;
    let (end, _) = rest.split_once(' ')?;
    let [start, end] = [start, end].map(|address| usize::from_str_radix(address, 16).ok());
    let (start, bytes) = (start?, end? - start?);
    // SAFETY: mapped memory of this length, which the shim never unmaps; every content is a valid region.
    (bytes >= size_of::<ClientRegion>()).then(|| unsafe { &*(start as *const ClientRegion) })
}

/// Kernels that the shim knows: the next one gets this index.
pub fn kernels(region: &ClientRegion) -> u32 {
    region.kernel_count.load(SeqCst)
}

/// Whether a kernel is run whole for good.
pub fn is_refused(region: &ClientRegion, kernel: u32) -> bool {
    let state = |word| transform_state::unpack(word).0;
    let entry = region.kernels.get(kernel as usize);
    entry.is_some_and(|entry| state(entry.transform.load(SeqCst)) == transform_state::WHOLE_ONLY)
}

/// Launches so far that ran code which the shim had rewritten.
pub fn transformed(region: &ClientRegion) -> u64 {
    let counters = &region.counters;
    counters.sliced.load(SeqCst) + counters.preemptible.load(SeqCst)
}
