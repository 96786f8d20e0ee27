//! Subordinate user ids: those of `/etc/subuid` count as their owner, who could otherwise act as thousands of users.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::sync::LazyLock;

/// Most bytes read of a file.
const BYTES_MAX: u64 = 1 << 20;
/// Most lines read of a file.
const LINES_MAX: usize = 4_096;

static TABLE: LazyLock<Table> = LazyLock::new(|| {
    Table::parse(&text(Path::new("/etc/subuid")), &text(Path::new("/etc/passwd")))
});

/// Read the system's files, unless they have been read.
pub fn load() {
    LazyLock::force(&TABLE);
}

/// Those of the system, as they were when first read.
pub fn table() -> &'static Table {
    &TABLE
}

/// The beginning of a file, empty without one.
fn text(path: &Path) -> String {
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path).and_then(|f| f.take(BYTES_MAX).read_to_end(&mut bytes));
    if let Err(error) = read
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!("{}: cannot be read for subordinate user ids: {error}", path.display());
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[derive(Debug)]
struct Range {
    start: u32,
    count: u32,
    owner: u32,
}

impl Range {
    fn contains(&self, uid: u32) -> bool {
        uid.checked_sub(self.start).is_some_and(|offset| offset < self.count)
    }
}

/// Ranges of subordinate user ids and their owners.
#[derive(Debug)]
pub struct Table(Vec<Range>);

impl Table {
    /// From the text of `/etc/subuid` and, for names, `/etc/passwd`. Lines that make no sense are ignored.
    pub fn parse(subuid: &str, passwd: &str) -> Self {
        let mut uids = BTreeMap::new();
        for line in passwd.lines().take(LINES_MAX) {
            let mut fields = line.split(':');
            if let (Some(name), Some(Ok(uid))) =
                (fields.next(), fields.nth(1).map(str::parse::<u32>))
            {
                uids.entry(name).or_insert(uid);
            }
        }
        Table(subuid.lines().take(LINES_MAX).filter_map(|line| range(line, &uids)).collect())
    }

    /// The user whom a user id counts as: its owner, or itself.
    pub fn owner(&self, uid: u32) -> u32 {
        self.0.iter().find(|range| range.contains(uid)).map_or(uid, |range| range.owner)
    }
}

/// The range of a line `NAME_OR_UID:START:COUNT`.
fn range(line: &str, uids: &BTreeMap<&str, u32>) -> Option<Range> {
    let fields: Vec<_> = line.trim().split(':').collect();
    let [who, start, count] = fields[..] else { return None };
    if who.is_empty() || who.starts_with('#') {
        return None;
    }
    let (start, count) = (start.parse::<u32>().ok()?, count.parse::<u32>().ok()?);
    start.checked_add(count.checked_sub(1)?)?;
    let mut range = Range { start, count, owner: start };
    let owner = uids.get(who).copied().or_else(|| who.parse().ok());
    if range.contains(0) || owner.is_some_and(|owner| range.contains(owner)) {
        return None;
    }
    // Root's, and those of a user of a directory service, are one user, but not root.
    range.owner = owner.filter(|owner| *owner != 0).unwrap_or(start);
    Some(range)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/:/bin/sh\nbroken\nbob:x:no\nann:x:7:7::/:\n";

    #[test]
    fn a_subordinate_user_id_is_its_owners() {
        let table = Table::parse("ann:100000:65536\n1001:165536:65536\n\nann:300000:1\n", PASSWD);
        for (uid, owner) in [
            (0, 0),
            (1_000, 1_000),
            (100_000, 1_000),
            (165_535, 1_000),
            (165_536, 1_001),
            (231_071, 1_001),
            (231_072, 231_072),
            (300_000, 1_000),
            (u32::MAX, u32::MAX),
        ] {
            assert_eq!(table.owner(uid), owner, "{uid}");
        }
    }

    #[test]
    fn lines_that_make_no_sense_are_ignored() {
        let lines = "#|#ann:100000:9|:100000:9|ann|ann:100000|ann:100000:9:9|ann:x:9|ann:-1:9|ann:100000:x|\
                     ann:100000:0|ann:4294967295:2|ann:4294967296:1|ann:0:10|ann:999:2|1001:1000:65536";
        for line in lines.split('|') {
            assert!(Table::parse(line, PASSWD).0.is_empty(), "{line}");
        }
        assert_eq!(Table::parse("ann:4294967295:1", PASSWD).owner(u32::MAX), 1_000);
        let many = "ann:100000:1\n".repeat(LINES_MAX + 1);
        assert_eq!(Table::parse(&many, PASSWD).0.len(), LINES_MAX);
    }

    #[test]
    fn those_of_root_and_of_unknown_names_are_one_user_and_not_root() {
        let table = Table::parse("root:100000:10\n0:200000:10\nstranger:300000:10\n", PASSWD);
        for start in [100_000, 200_000, 300_000] {
            assert_eq!((table.owner(start), table.owner(start + 9)), (start, start));
        }
    }
}
