//! A policy that runs launches in every form on offer, and has clients yield at random.
//!
//! For tests of the mechanisms: every best-effort launch runs in the configured form
//! where that is on offer, and has its kernel transformed where it could be. Clients are asked to
//! yield, and to go on, after random times (from a seed: the same every run). Nothing is
//! held back, so that as many launches as possible are under way; but with `form = 5`
//! launches are held at random, and each gets one of the forms on offer, of a random size. With `form = 6` all run,
//! with leases, and clients have a width: `sms` (0: all), or with `toggle_us` another one after random times.

use std::fmt::Write as _;
use tally_sdk::config::Config;
use tally_sdk::host::{self, Counter};
use tally_sdk::{
    Answer, Client, ClientId, Decision, Launch, Level, Membership, Policy, PriorityClass, Timer,
    WINDOW_OPEN,
};

/// Token of the only timer.
const TOGGLE: u64 = 1;

/// Which form launches are to run in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Forms {
    Preemptible,
    Sliced,
    SmLimited,
    /// One of the three for each launch, at random.
    Mixed,
    Whole,
    /// Any that is on offer, whole included, of a random size, perhaps after holding it.
    Random,
    /// On the client's width.
    Width,
}

struct RandomForms {
    forms: Forms,
    /// Slices have 1/n of the grid.
    slices: u64,
    sms: u32,
    /// [`Forms::Width`]: launches that start unasked behind each.
    lease: u32,
    /// Longest time between two changes of mind; 0: nobody is ever asked.
    toggle_ns: u64,
    /// [`Forms::Random`]: longest hold; 0: none.
    hold_ns: u64,
    window_ns: u64,
    random: u64,
    clients: Vec<ClientId>,
    yielded: bool,
    toggles: Counter,
}

impl RandomForms {
    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// A form on offer, or one that could be made, of a random size.
    fn any(&mut self, launch: &Launch) -> Decision {
        if self.hold_ns > 0 && self.next().is_multiple_of(4) {
            return Decision::Hold(self.next() % self.hold_ns + 1);
        }
        let prepares = launch.can_prepare();
        match self.next() % 5 {
            0 if launch.can_preempt() || prepares => Decision::Preemptible,
            1 | 2 if launch.can_slice() || prepares => {
                let most = launch.grid_blocks.clamp(1, u64::from(u32::MAX));
                // Small ones as often as large ones.
                let bits = self.next() % (64 - u64::from(most.leading_zeros())) + 1;
                let size = self.next() % (1 << bits) + 1;
                Decision::Sliced(size.min(most) as u32)
            }
            3 if launch.can_limit() => {
                Decision::SmLimited((self.next() % u64::from(self.sms)) as u32 + 1)
            }
            _ => Decision::Run(0),
        }
    }

    fn form(&mut self, launch: &Launch) -> Decision {
        if self.forms == Forms::Random {
            return self.any(launch);
        }
        let slice = (launch.grid_blocks / self.slices).clamp(1, u64::from(u32::MAX)) as u32;
        let forms = match self.forms {
            Forms::Mixed => match self.next() % 3 {
                0 => Forms::Preemptible,
                1 => Forms::Sliced,
                _ if launch.can_limit() => Forms::SmLimited,
                _ => Forms::Whole,
            },
            forms => forms,
        };
        match forms {
            Forms::Preemptible if launch.can_preempt() || launch.can_prepare() => {
                Decision::Preemptible
            }
            Forms::Sliced if launch.can_slice() || launch.can_prepare() => Decision::Sliced(slice),
            Forms::SmLimited if launch.can_limit() => Decision::SmLimited(self.sms),
            // What can be limited to some of the SMs must have been looked at.
            Forms::SmLimited if launch.can_prepare() => Decision::Preemptible,
            Forms::Width if launch.can_prepare() && !launch.can_limit() => Decision::Preemptible,
            // Decided as well: a width limits no kernel before it was measured, and short programs measure few.
            Forms::Width if launch.can_limit() && !self.next().is_multiple_of(4) => {
                let sms = if self.toggle_ns > 0 { self.any_width() } else { self.sms };
                match sms {
                    // Asked about as often as with a width.
                    0 if self.toggle_ns == 0 => Decision::Run(0),
                    0 => Decision::Run(self.lease),
                    sms => Decision::SmLimited(sms),
                }
            }
            Forms::Width => Decision::Run(self.lease),
            _ => Decision::Run(0),
        }
    }

    /// One of the widths that there are, or none.
    fn any_width(&mut self) -> u32 {
        let all = host::widths();
        let at = self.next() as usize % (all.len() + 1);
        all.get(at).copied().unwrap_or(0)
    }

    fn schedule(&mut self) {
        if self.toggle_ns > 0 {
            // Shorter while it yields: there is work to be done, too.
            let most = if self.yielded { self.toggle_ns / 4 } else { self.toggle_ns };
            let delay_ns = self.next() % most.max(1) + 1;
            host::set_timer(delay_ns, TOGGLE);
        }
    }
}

impl Policy for RandomForms {
    fn init(config: &str) -> Result<Self, String> {
        let mut config = Config::parse(config)?;
        let forms = match config.integer("form", 3, 0..=6)? {
            0 => Forms::Preemptible,
            1 => Forms::Sliced,
            2 => Forms::SmLimited,
            3 => Forms::Mixed,
            4 => Forms::Whole,
            5 => Forms::Random,
            _ => Forms::Width,
        };
        let slices = config.integer("slices", 4, 1..=1_000)?;
        let least = u64::from(forms != Forms::Width);
        let sms = config.integer("sms", 1, least..=1_000)? as u32;
        let lease = config.integer("lease", 8, 0..=1_000_000)? as u32;
        let toggle_ns = config.integer("toggle_us", 0, 0..=1_000_000)? * 1_000;
        let hold_ns = config.integer("hold_us", 0, 0..=1_000_000)? * 1_000;
        let window_ns = match config.integer("window_us", 0, 0..=10_000_000)? {
            0 => WINDOW_OPEN,
            us => us * 1_000,
        };
        let random = config.integer("seed", 1, 1..=u64::MAX)?;
        config.finish()?;
        let mut text = String::new();
        let _ = write!(text, "{forms:?}, toggling within {toggle_ns} ns, seed {random}");
        host::log(Level::Info, &text);
        let toggles = Counter::new("toggles");
        let clients = Vec::new();
        Ok(RandomForms {
            forms,
            slices,
            sms,
            lease,
            toggle_ns,
            hold_ns,
            window_ns,
            random,
            clients,
            yielded: false,
            toggles,
        })
    }

    fn decide(&mut self, launch: &Launch) -> Answer {
        if launch.is_high() { Decision::Run(0) } else { self.form(launch) }.into()
    }
}

impl Membership for RandomForms {
    fn joined(&mut self, _now_ns: u64, client: &Client) {
        if client.class == PriorityClass::BestEffort {
            host::set_window(client.id, self.window_ns);
            if self.forms == Forms::Width && self.toggle_ns == 0 {
                host::set_width(client.id, self.sms);
            }
            self.clients.push(client.id);
            if self.clients.len() == 1 {
                self.schedule();
            }
        }
    }

    fn left(&mut self, _now_ns: u64, client: ClientId) {
        self.clients.retain(|id| *id != client);
        if self.clients.is_empty() {
            self.yielded = false;
        }
    }
}

impl Timer for RandomForms {
    fn fired(&mut self, _now_ns: u64, _token: u64) {
        if self.clients.is_empty() {
            return;
        }
        if self.forms == Forms::Width {
            for at in 0..self.clients.len() {
                let sms = self.any_width();
                host::set_width(self.clients[at], sms);
            }
        } else {
            self.yielded = !self.yielded;
            for &client in &self.clients {
                host::set_yield(client, self.yielded);
            }
        }
        self.toggles.add(1);
        self.schedule();
    }
}

tally_sdk::export!(RandomForms: membership, timer);
