//! Notices that the policy's file, or its configuration, was replaced.
//!
//! The folders are watched and not the files: a file that is replaced by a
//! rename would be watched no longer. What links lead to is looked at from time to time: they may lead elsewhere (as in
//! a Kubernetes volume) without an event in these folders, and a folder may be removed and made anew.

use crate::policy_slot::Source;
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tally_trust::signature_file;
use tokio::sync::mpsc;

pub struct PolicyWatch {
    watcher: RecommendedWatcher,
    files: Arc<Mutex<BTreeSet<PathBuf>>>,
    folders: BTreeSet<PathBuf>,
    changed: mpsc::Receiver<()>,
    debounce: Duration,
    /// What the files were when they were last looked at.
    seen: BTreeMap<PathBuf, Option<Fingerprint>>,
}

/// How often they are looked at.
const LOOK: Duration = Duration::from_secs(2);

/// Tells one content of a file from another, as far as that goes without reading it: device, inode, time and size.
type Fingerprint = [i64; 5];

fn fingerprint(file: &Path) -> Option<Fingerprint> {
    let about = std::fs::metadata(file).ok()?;
    let [device, inode, size] = [about.dev(), about.ino(), about.size()].map(|n| n as i64);
    Some([device, inode, size, about.mtime(), about.mtime_nsec()])
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.into())
}

impl PolicyWatch {
    /// Watch nothing yet.
    ///
    /// # Errors
    /// If the system offers no watching (too few inotify instances, usually).
    pub fn new(debounce: Duration) -> notify::Result<Self> {
        let (sender, changed) = mpsc::channel(1);
        let files = Arc::new(Mutex::new(BTreeSet::<PathBuf>::new()));
        let watched = files.clone();
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            let Ok(event) = event else { return };
            if matches!(event.kind, EventKind::Access(_)) {
                return;
            }
            let watched = watched.lock().unwrap_or_else(PoisonError::into_inner);
            if event.need_rescan() || event.paths.iter().any(|p| watched.contains(p)) {
                // Full means that one is on its way already.
                let _ = sender.try_send(());
            }
        })?;
        let (folders, seen) = (BTreeSet::new(), BTreeMap::new());
        Ok(PolicyWatch { watcher, files, folders, changed, debounce, seen })
    }

    /// Watch this source instead of what was watched before.
    pub fn follow(&mut self, source: &Source) {
        let files: BTreeSet<PathBuf> = std::iter::once(&source.file)
            .chain(&source.config_file)
            .map(|file| absolute(file))
            // A signature that comes after its file may make it loadable.
            .chain([absolute(&signature_file(&source.file))])
            .collect();
        let folders: BTreeSet<PathBuf> =
            files.iter().filter_map(|file| file.parent().map(Path::to_path_buf)).collect();
        self.seen = files.iter().map(|file| (file.clone(), fingerprint(file))).collect();
        *self.files.lock().unwrap_or_else(PoisonError::into_inner) = files;
        for old in self.folders.difference(&folders) {
            let _ = self.watcher.unwatch(old);
        }
        for new in folders.difference(&self.folders) {
            if let Err(error) = self.watcher.watch(new, RecursiveMode::NonRecursive) {
                tracing::warn!(folder = %new.display(), "cannot be watched, use SIGHUP or `tallyctl policy load`: {error}");
            }
        }
        self.folders = folders;
    }

    /// Wait until a watched file has changed and been left alone for a while.
    pub async fn changed(&mut self) {
        loop {
            match tokio::time::timeout(LOOK, self.changed.recv()).await {
                Ok(Some(())) => break,
                Ok(None) => return std::future::pending().await,
                Err(_) if self.look() => break,
                Err(_) => {}
            }
        }
        while let Ok(Some(())) = tokio::time::timeout(self.debounce, self.changed.recv()).await {}
        self.look();
    }

    /// Whether a file is another one, or has changed, since this was last asked.
    fn look(&mut self) -> bool {
        let mut has_changed = false;
        for (file, seen) in &mut self.seen {
            let now = fingerprint(file);
            has_changed |= std::mem::replace(seen, now) != now;
        }
        has_changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rewriting_and_renaming_over_are_noticed_and_neighbours_are_not() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("p.wasm");
        std::fs::write(&file, "1").unwrap();
        runtime.block_on(async {
            let mut watch = PolicyWatch::new(Duration::from_millis(20)).unwrap();
            watch.follow(&Source { file: file.clone(), config_file: None });
            let long = Duration::from_secs(20);
            std::fs::write(&file, "2").unwrap();
            tokio::time::timeout(long, watch.changed()).await.unwrap();
            for _ in 0..2 {
                let aside = dir.path().join("aside");
                std::fs::write(&aside, "3").unwrap();
                std::fs::rename(&aside, &file).unwrap();
                tokio::time::timeout(long, watch.changed()).await.unwrap();
            }
            std::fs::write(dir.path().join("other"), "x").unwrap();
            let short = Duration::from_millis(200);
            assert!(tokio::time::timeout(short, watch.changed()).await.is_err());
        });
    }

    #[test]
    fn a_link_that_leads_elsewhere_and_a_folder_that_is_made_anew_are_noticed() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for version in ["1", "2"] {
            std::fs::create_dir(path(version)).unwrap();
            std::fs::write(path(version).join("p.wasm"), version).unwrap();
        }
        std::os::unix::fs::symlink("1", path("data")).unwrap();
        std::fs::create_dir(path("mounted")).unwrap();
        std::os::unix::fs::symlink("../data/p.wasm", path("mounted/p.wasm")).unwrap();
        let file = path("mounted/p.wasm");
        runtime.block_on(async {
            let mut watch = PolicyWatch::new(Duration::from_millis(20)).unwrap();
            watch.follow(&Source { file: file.clone(), config_file: None });
            let long = Duration::from_secs(20);
            std::os::unix::fs::symlink("2", path("new")).unwrap();
            std::fs::rename(path("new"), path("data")).unwrap();
            tokio::time::timeout(long, watch.changed()).await.unwrap();
            assert_eq!(std::fs::read_to_string(&file).unwrap(), "2");
            std::fs::remove_dir_all(path("mounted")).unwrap();
            tokio::time::timeout(long, watch.changed()).await.unwrap();
            std::fs::create_dir(path("mounted")).unwrap();
            std::fs::write(&file, "3").unwrap();
            tokio::time::timeout(long, watch.changed()).await.unwrap();
            let short = Duration::from_millis(3_000);
            assert!(tokio::time::timeout(short, watch.changed()).await.is_err(), "once");
        });
    }
}
