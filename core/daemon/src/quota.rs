//! How much of the core each user may take, so that none keeps the others out. Pure: the clock is handed in.
//!
//! | of | one user | all | reserved for |
//! | --- | --- | --- | --- |
//! | connections that have not registered | [`Pool`] | by descriptors | trusted users ([`crate::admit`]) |
//! | clients | `user_clients_max` | `clients_max`, or by descriptors | high-priority clients |
//! | joins a second | `user_joins_per_s` ([`Rate`]) | | |
//! | kernels | `user_kernels_max` | 65 536 | the same as connections |
//! | admin connections | [`Pool`] | `ADMIN_CONNECTIONS_MAX` | admins |

use crate::config::Admission;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tally_contract::limits::{UNREGISTERED_FEW_MAX, UNREGISTERED_MAX};

/// The users that share a quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum User {
    /// A user outside containers.
    Uid(u32),
    /// A container, whose root may be any number and make further namespaces: the inode of its outermost namespace.
    Container(u64),
    /// All containers that this user made without rights of root's.
    ContainersOf(u32),
    /// All those together that cannot be told apart.
    Containers,
    /// All users in containers who may be high priority, together (`high_priority.containers`).
    HighContainers,
}

impl std::fmt::Display for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            User::Uid(uid) => write!(f, "user {uid}"),
            User::Container(namespace) => write!(f, "the container in namespace {namespace}"),
            User::ContainersOf(uid) => write!(f, "the group of all containers of user {uid}"),
            User::Containers => write!(f, "the group of all containers"),
            User::HighContainers => write!(f, "the group of all high-priority containers"),
        }
    }
}

/// Descriptors of the core for each client: its socket, its process and its doorbell.
pub const DESCRIPTORS_EACH: u64 = 3;
/// Descriptors of the core for each connection that has not registered: its socket, its process, and what it
/// may send.
const DESCRIPTORS_UNREGISTERED: u64 = 2 + REGISTRATION_DESCRIPTORS as u64;
/// Descriptors taken from a connection that registers.
pub const REGISTRATION_DESCRIPTORS: usize = 2;
/// Registrations whose descriptors are being made.
pub const REGISTERING_MAX: usize = 8;
/// For those, admin connections and their files, policies, logs and the rest.
const DESCRIPTORS_OTHER: u64 = 64 + 48 + 128;
/// Connections that got no place and are not closed yet.
const TURNED_AWAY_MAX: usize = 1_024;

/// What there is room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Descriptors that this process may have.
    pub descriptors: u64,
    /// Connections that have not registered.
    pub unregistered: usize,
    /// Connections that got no place and are not closed yet.
    pub turned_away: usize,
    /// Clients for which there are descriptors.
    pub clients_fit: usize,
    /// Clients served at once.
    pub clients: usize,
}

impl Room {
    /// What fits into this limit on descriptors.
    pub fn new(descriptors: u64, clients_max: usize) -> Self {
        let unregistered =
            if descriptors >= 4_096 { UNREGISTERED_MAX } else { UNREGISTERED_FEW_MAX };
        let turned_away = if descriptors >= 16_384 { TURNED_AWAY_MAX } else { 32 };
        let other =
            DESCRIPTORS_OTHER + DESCRIPTORS_UNREGISTERED * unregistered as u64 + turned_away as u64;
        let fit = (descriptors.saturating_sub(other) / DESCRIPTORS_EACH).max(1) as usize;
        let clients = clients_max.min(fit);
        Room { descriptors, unregistered, turned_away, clients_fit: fit, clients }
    }
}

/// Why there is no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaExceeded {
    /// The user has this many places already.
    User(usize),
    /// All are taken, or all but those that are reserved for others.
    All(usize),
}

/// Places, some of which are reserved.
#[derive(Debug)]
pub struct Pool {
    all: usize,
    reserved: usize,
    taken: BTreeMap<User, usize>,
    taken_all: usize,
    /// By those who may not use the reserved ones.
    taken_others: usize,
}

impl Pool {
    /// `all` places, `reserved` of them for some users or classes.
    pub fn new(all: usize, reserved: usize) -> Rc<RefCell<Self>> {
        let taken = BTreeMap::new();
        Rc::new(RefCell::new(Pool { all, reserved, taken, taken_all: 0, taken_others: 0 }))
    }

    #[cfg(any(test, fuzzing))]
    pub fn taken(&self) -> usize {
        self.taken_all
    }

    fn why_not(
        &self,
        user: User,
        user_max: usize,
        may_use_reserved: bool,
    ) -> Option<QuotaExceeded> {
        if self.taken_all >= self.all
            || (!may_use_reserved && self.taken_others >= self.all - self.reserved)
        {
            return Some(QuotaExceeded::All(self.taken_all));
        }
        let has = self.taken.get(&user).copied().unwrap_or(0);
        (has >= user_max).then_some(QuotaExceeded::User(has))
    }
}

/// A place, until it is dropped.
#[derive(Debug)]
pub struct QuotaPlace {
    pool: Rc<RefCell<Pool>>,
    user: User,
    may_use_reserved: bool,
}

impl QuotaPlace {
    /// Take one for a user who may have `user_max`.
    ///
    /// # Errors
    /// If there is none.
    pub fn take(
        pool: &Rc<RefCell<Pool>>,
        user: User,
        user_max: usize,
        may_use_reserved: bool,
    ) -> Result<Self, QuotaExceeded> {
        let mut p = pool.borrow_mut();
        if let Some(full) = p.why_not(user, user_max, may_use_reserved) {
            return Err(full);
        }
        *p.taken.entry(user).or_default() += 1;
        p.taken_all += 1;
        p.taken_others += usize::from(!may_use_reserved);
        Ok(QuotaPlace { pool: pool.clone(), user, may_use_reserved })
    }
}

impl Drop for QuotaPlace {
    fn drop(&mut self) {
        let mut p = self.pool.borrow_mut();
        p.taken_all -= 1;
        p.taken_others -= usize::from(!self.may_use_reserved);
        if let Some(has) = p.taken.get_mut(&self.user) {
            *has -= 1;
            if *has == 0 {
                p.taken.remove(&self.user);
            }
        }
    }
}

/// Users whose rate is kept track of.
const USERS_MAX: usize = 4_096;

/// A limit on events a second for each user, after a burst (the generic cell rate algorithm).
#[derive(Debug)]
pub struct Rate {
    each: Duration,
    burst: Duration,
    /// When a user's next one would be due at an even rate.
    due: BTreeMap<User, Instant>,
}

impl Rate {
    /// `per_s` a second, and `burst` at once.
    pub fn new(per_s: u32, burst: u32) -> Self {
        let each = Duration::from_secs(1) / per_s.max(1);
        Rate { each, burst: each * burst, due: BTreeMap::new() }
    }

    /// One more: how long it is to wait. `None`: longer than `most`, and it does not count.
    pub fn next(&mut self, user: User, now: Instant, most: Duration) -> Option<Duration> {
        if self.due.len() >= USERS_MAX {
            self.due.retain(|_, due| *due > now);
        }
        let known = self.due.get(&user).copied();
        if known.is_none() && self.due.len() >= USERS_MAX {
            return None;
        }
        let due = known.map_or(now, |due| due.max(now));
        let wait = (due + self.each).saturating_duration_since(now + self.burst);
        if wait > most {
            return None;
        }
        self.due.insert(user, due + self.each);
        Some(wait)
    }
}

/// How many connections that have not registered one user may have, and whether it may use reserved places.
pub fn unregistered_of_user(room: &Room, user: User, is_trusted: bool) -> (usize, bool) {
    match (user, is_trusted) {
        // The rest of the reserved ones is left to users outside containers.
        (User::HighContainers, _) => (reserved_unregistered(room) / 2, true),
        (_, true) => (room.unregistered / 4, true),
        (_, false) => (room.unregistered / 8, false),
    }
}

/// Places for unregistered connections that are reserved for trusted users: enough for each of them.
pub fn reserved_unregistered(room: &Room) -> usize {
    room.unregistered * 3 / 8
}

/// How many clients of a class one user may have, and whether they may use reserved places.
pub fn clients_of_user(
    settings: &Admission,
    room: &Room,
    is_trusted: bool,
    is_high: bool,
) -> (usize, bool) {
    let reserved = reserved_clients(settings, room);
    let most = match (is_trusted, is_high) {
        // Half of the reserved ones are left for other users' high-priority clients.
        (true, _) | (_, true) => room.clients - reserved / 2,
        (false, false) => settings.user_clients_max,
    };
    (most, is_high)
}

/// Places that are reserved for high-priority clients.
pub fn reserved_clients(settings: &Admission, room: &Room) -> usize {
    settings.reserved_clients.min(room.clients / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(uid: u32) -> User {
        User::Uid(uid)
    }

    #[test]
    fn no_user_takes_the_places_of_others_nor_reserved_ones() {
        let pool = Pool::new(10, 3);
        let mut held: Vec<_> =
            (0..4).map(|_| QuotaPlace::take(&pool, user(1), 4, false).unwrap()).collect();
        assert_eq!(QuotaPlace::take(&pool, user(1), 4, false).unwrap_err(), QuotaExceeded::User(4));
        held.extend((0..3).map(|_| QuotaPlace::take(&pool, User::Containers, 4, false).unwrap()));
        assert_eq!(QuotaPlace::take(&pool, user(2), 4, false).unwrap_err(), QuotaExceeded::All(7));
        held.extend((0..3).map(|_| QuotaPlace::take(&pool, user(0), 4, true).unwrap()));
        assert_eq!(QuotaPlace::take(&pool, user(3), 4, true).unwrap_err(), QuotaExceeded::All(10));
        held.clear();
        assert_eq!(
            (pool.borrow().taken_all, pool.borrow().taken_others, pool.borrow().taken.len()),
            (0, 0, 0)
        );
        QuotaPlace::take(&pool, user(1), 4, false).unwrap();
    }

    #[test]
    fn one_users_clients_leave_room_for_high_priority_ones_of_others() {
        let settings = Admission::default();
        let room = Room::new(1 << 20, settings.clients_max);
        assert_eq!(room.clients, settings.clients_max);
        let reserved = reserved_clients(&settings, &room);
        let pool = Pool::new(room.clients, reserved);
        let take = |who: User, trusted: bool, high: bool| {
            let (most, may_use_reserved) = clients_of_user(&settings, &room, trusted, high);
            QuotaPlace::take(&pool, who, most, may_use_reserved)
        };
        let flood = |who: User, trusted: bool, high: bool| -> Vec<QuotaPlace> {
            std::iter::from_fn(|| take(who, trusted, high).ok()).collect()
        };
        let others: Vec<_> = (1..20).flat_map(|uid| flood(user(uid), false, false)).collect();
        assert_eq!(others.len(), room.clients - reserved);
        let high = flood(user(30), true, true);
        assert_eq!(high.len(), reserved, "one service takes what is left");
        drop((others, high));
        let mut own = flood(user(0), true, false);
        own.extend(flood(user(0), true, true));
        assert_eq!(own.len(), room.clients - reserved / 2);
        take(user(30), true, true).unwrap();
    }

    #[test]
    fn containers_leave_reserved_connections_to_users_outside() {
        for descriptors in [1_024, 1 << 20] {
            let room = Room::new(descriptors, 256);
            let reserved = reserved_unregistered(&room);
            let pool = Pool::new(room.unregistered, reserved);
            let flood = |user| {
                let (most, may_use_reserved) = unregistered_of_user(&room, user, false);
                let take = || QuotaPlace::take(&pool, user, most, may_use_reserved).ok();
                std::iter::from_fn(take).collect::<Vec<_>>()
            };
            let held = [flood(User::Containers), flood(User::HighContainers)];
            assert_eq!(held[0].len(), room.unregistered / 8);
            assert!((1..reserved).contains(&held[1].len()));
            let others: Vec<_> = (1..50).flat_map(|uid| flood(user(uid))).collect();
            let (most, may_use_reserved) = unregistered_of_user(&room, user(0), true);
            QuotaPlace::take(&pool, user(0), most, may_use_reserved)
                .expect("a place is reserved for root");
            drop((held, others));
        }
    }

    #[test]
    fn a_rate_has_a_burst_and_then_waits_evenly() {
        let mut rate = Rate::new(10, 5);
        let now = Instant::now();
        let most = Duration::from_millis(250);
        let waits: Vec<_> =
            (0..10).map_while(|_| rate.next(user(1), now, most)).map(|w| w.as_millis()).collect();
        assert_eq!(waits, [0, 0, 0, 0, 0, 100, 200]);
        assert_eq!(rate.next(user(2), now, most), Some(Duration::ZERO), "another user");
        let later = now + Duration::from_millis(700);
        assert_eq!(rate.next(user(1), later, most), Some(Duration::ZERO));
        for uid in 3..10_000 {
            rate.next(user(uid), later, most);
        }
        assert!(rate.due.len() <= USERS_MAX);
    }

    #[test]
    fn what_fits_follows_from_the_limit_on_descriptors() {
        assert_eq!(Room::new(1 << 19, 256).clients, 256);
        let small = Room::new(1_024, 256);
        assert_eq!((small.clients, small.clients_fit), (208, 208));
        let needed =
            DESCRIPTORS_OTHER + 32 * DESCRIPTORS_UNREGISTERED + 32 + 208 * DESCRIPTORS_EACH;
        assert!(needed <= 1_024);
        assert_eq!(Room::new(64, 256).clients, 1);
    }
}
