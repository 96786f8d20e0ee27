//! Links of other users on the way to a path. Through one of theirs they may lead this process to files that they could
//! not read or write themselves.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// Links followed at most, as the kernel does.
const LINKS_MAX: u32 = 40;

/// Users other than root and this one that own a link on the way to a path, which may be missing in part.
pub fn owners(path: &Path) -> BTreeSet<u32> {
    let own = rustix::process::geteuid().as_raw();
    let mut found = BTreeSet::new();
    let mut note = |uid: u32| {
        if uid != 0 && uid != own {
            found.insert(uid);
        }
    };
    let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
    let (mut at, mut links) = (PathBuf::from("/"), 0);
    let mut left: Vec<OsString> = parts(&path);
    while let Some(part) = left.pop() {
        if part == ".." {
            at.pop();
            continue;
        }
        let next = at.join(&part);
        match std::fs::symlink_metadata(&next) {
            Ok(about) if about.is_symlink() => {
                note(about.uid());
                links += 1;
                let Ok(target) = std::fs::read_link(&next) else { break };
                if links > LINKS_MAX {
                    break;
                }
                if target.is_absolute() {
                    at = PathBuf::from("/");
                }
                left.extend(parts(&target));
            }
            Ok(_) => at = next,
            Err(_) => break,
        }
    }
    found
}

/// The last one first.
fn parts(path: &Path) -> Vec<OsString> {
    let part = |component: Component<'_>| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    };
    path.components().rev().filter_map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{lchown, symlink};

    #[test]
    fn owners_of_links_on_the_way_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        assert_eq!(owners(&root.join("missing/too")), BTreeSet::new());
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        std::fs::write(root.join("a/b/file"), "").unwrap();
        symlink("loop", root.join("loop")).unwrap();
        assert_eq!(owners(&root.join("loop/x")), BTreeSet::new());
        symlink(root.join("a/b"), root.join("ours")).unwrap();
        assert_eq!(owners(&root.join("ours/file")), BTreeSet::new());
        symlink("../a", root.join("a/theirs")).unwrap();
        if lchown(root.join("a/theirs"), Some(65_534), None).is_err() {
            // Only root can give one away.
            return;
        }
        let theirs = BTreeSet::from([65_534]);
        assert_eq!(owners(&root.join("a/theirs")), theirs);
        assert_eq!(owners(&root.join("a/theirs/b/file")), theirs);
        assert_eq!(owners(&root.join("ours/../theirs/x")), theirs, "behind another link");
        assert_eq!(owners(&root.join("a/theirs/../a/b/file")), theirs);
    }
}
