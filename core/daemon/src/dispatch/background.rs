//! What takes the dispatch thread longer than a pass may: collecting what it profiled of
//! kernels, and forgetting it. Done in pieces, a few kernels a pass.

use super::Engine;
use super::profile_cache::ProfileCache;
use crate::profile_store::profiled::{Device, Loaded, News, Profiled};
use std::sync::Arc;
use tokio::sync::oneshot;

/// Kernels looked at in one pass.
const LOOKED: u32 = 512;
/// Kernels copied, or forgotten, in one pass.
const HANDLED: usize = 8;
/// Kernels in an answer: the memory that it takes is bounded, too.
const ANSWER: usize = 256;

/// Some of what was profiled.
#[derive(Debug)]
pub struct Piece {
    /// The GPU; without one there is no news.
    pub device: Option<Device>,
    /// Kernels of which something was profiled since they were told last.
    pub news: Vec<News>,
    /// Where to go on; `None`: this was all.
    pub next: Option<u32>,
}

/// What is no longer known.
pub struct Forgotten {
    /// Kernels whose measurements are gone.
    pub kernels: u32,
    pub device: Option<Device>,
    pub(super) _cached: (Option<Arc<Loaded>>, Option<Arc<Profiled>>),
}

/// A task that the dispatch thread does bit by bit, between launches.
pub enum Background {
    Collect {
        done: oneshot::Sender<Piece>,
        /// The next place of the table.
        at: u32,
        news: Vec<News>,
    },
    Forget {
        done: oneshot::Sender<Forgotten>,
        /// The next place of the table.
        at: u32,
        kernels: u32,
        /// Freed by the control plane, because it takes long.
        cached: (Option<Arc<Loaded>>, Option<Arc<Profiled>>),
    },
}

impl Background {
    /// Collect from a place of the table on.
    pub fn collect(from: u32, done: oneshot::Sender<Piece>) -> Self {
        Background::Collect { done, at: from, news: Vec::new() }
    }

    /// Forget all. What comes while it is under way is not looked up any more.
    pub fn forget(profile_cache: &mut ProfileCache, done: oneshot::Sender<Forgotten>) -> Self {
        Background::Forget { done, at: 0, kernels: 0, cached: profile_cache.forget() }
    }

    /// Do a piece. What is left of it, if anything is.
    pub fn step(self, engine: &mut Engine, profile_cache: &ProfileCache) -> Option<Self> {
        let device = profile_cache.device();
        match self {
            Background::Collect { done, mut at, mut news } => {
                let more = device.is_some() && collect(&mut at, &mut news, engine);
                if more && news.len() < ANSWER {
                    return Some(Background::Collect { done, at, news });
                }
                let _ = done.send(Piece { device, news, next: more.then_some(at) });
            }
            Background::Forget { done, mut at, mut kernels, cached } => {
                for _ in 0..HANDLED {
                    let Some(known) = engine.forget_profile_at(at) else {
                        let _ = done.send(Forgotten { kernels, device, _cached: cached });
                        return None;
                    };
                    at += 1;
                    kernels += u32::from(known);
                }
                return Some(Background::Forget { done, at, kernels, cached });
            }
        }
        None
    }
}

/// Whether there may be more from `at` on.
fn collect(at: &mut u32, news: &mut Vec<News>, engine: &mut Engine) -> bool {
    let full = news.len() + HANDLED;
    for _ in 0..LOOKED {
        let profiles = &engine.world().profiles;
        if !profiles.has_news() || *at >= profiles.places() {
            return false;
        }
        if news.len() == full {
            return true;
        }
        let kernel = profiles.at(*at).map(|(kernel, _)| kernel);
        if let Some(profile) = kernel.and_then(|kernel| engine.take_profile_news(kernel)) {
            news.push(profile.into());
        }
        *at += 1;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpus::Named;
    use crate::profile_store::profiled::Device;
    use std::sync::atomic::Ordering::Relaxed;
    use tally_engine::policy::{Class, ClientInfo};
    use tally_engine::profile::KernelKey;
    use tally_engine::{EngineConfig, Measured, Submission};

    fn key(x: u32) -> KernelKey {
        KernelKey { name: "k".into(), image: 1, grid: [x, 1, 1], block: [1; 3] }
    }

    /// An engine in which the first `measured` of `kernels` kernels took 1 us.
    fn engine(kernels: u32, measured: u32) -> Engine {
        let config = EngineConfig { window_ns: u64::MAX, ..Default::default() };
        let mut engine = Engine::with_policy(config, super::super::built_in());
        let mut out = Vec::new();
        let info = ClientInfo { id: 1, class: Class::BestEffort, name: "c".into(), labels: vec![] };
        engine.client_joined(0, info, 0, &mut out);
        for x in 0..kernels {
            let kernel = engine.intern(&key(x));
            if x >= measured {
                continue;
            }
            let submission = Submission {
                ticket: x.into(),
                kernel,
                state: 0,
                offered: 0,
                grid_blocks: 1,
                block_threads: 1,
                shared_bytes: 0,
                stream: 0,
                completion: x + 1,
                started: false,
                limited_sms: 0,
            };
            let now = u64::from(x) * 10_000;
            engine.submitted(now, 1, submission, &mut out);
            let measured = Measured { completion: x + 1, ns: 1_000 };
            engine.progress(now + 1_000, 1, 0, x + 1, Some(measured), &mut out);
        }
        engine
    }

    fn run(mut background: Background, engine: &mut Engine, profile_cache: &ProfileCache) -> usize {
        for steps in 1.. {
            match background.step(engine, profile_cache) {
                Some(rest) => background = rest,
                None => return steps,
            }
        }
        unreachable!()
    }

    fn profile_cache() -> ProfileCache {
        let (_fd, region) = tally_ipc::map::create_client().unwrap();
        region.report.device_uuid[0].store(5, Relaxed);
        region.report.sm_count.store(4, Relaxed);
        let mut profile_cache = ProfileCache::default();
        let named = Device::of(&region.report).map(|device| Named { device, decides: true });
        profile_cache.restore(named, &key(0), 0, &mut engine(0, 0));
        assert_eq!(profile_cache.device(), Device::of(&region.report));
        profile_cache
    }

    #[test]
    fn news_is_collected_in_pieces_and_once() {
        let (mut engine, profile_cache) = (engine(2_000, 600), profile_cache());
        let (mut from, mut all) = (Some(0), Vec::new());
        while let Some(first) = from {
            let (done, mut answer) = oneshot::channel();
            run(Background::collect(first, done), &mut engine, &profile_cache);
            let piece = answer.try_recv().unwrap();
            assert!(piece.device.is_some() && piece.news.len() <= ANSWER);
            all.extend(piece.news);
            from = piece.next;
        }
        assert_eq!(all.len(), 600);
        assert!(all.iter().all(|n| n.figures.count == 1 && n.figures.mean_ns == 1_000));
        let (done, mut answer) = oneshot::channel();
        let steps = run(Background::collect(0, done), &mut engine, &profile_cache);
        assert_eq!((steps, answer.try_recv().unwrap().news.len()), (1, 0), "nothing new, no scan");
    }

    #[test]
    fn news_waits_until_the_gpu_is_known() {
        let mut engine = engine(5, 5);
        let (done, mut answer) = oneshot::channel();
        run(Background::collect(0, done), &mut engine, &ProfileCache::default());
        let piece = answer.try_recv().unwrap();
        assert_eq!((piece.device, piece.news.len(), piece.next), (None, 0, None));
        let (done, mut answer) = oneshot::channel();
        run(Background::collect(0, done), &mut engine, &profile_cache());
        assert_eq!(answer.try_recv().unwrap().news.len(), 5);
    }

    #[test]
    fn all_is_forgotten_in_pieces() {
        for kernels in [0, 1, HANDLED as u32, 100] {
            let (mut engine, mut profile_cache) = (engine(kernels, kernels), profile_cache());
            let (done, mut answer) = oneshot::channel();
            let steps =
                run(Background::forget(&mut profile_cache, done), &mut engine, &profile_cache);
            assert_eq!(answer.try_recv().unwrap().kernels, kernels);
            assert_eq!(steps, kernels as usize / HANDLED + 1);
            let profiles = &engine.world().profiles;
            assert_eq!((profiles.has_news(), profiles.known()), (false, 0), "the table is free");
        }
    }
}
