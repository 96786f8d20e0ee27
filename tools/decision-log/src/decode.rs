//! Records out of bytes that may be anything: every length is checked against what is
//! there before anything is allocated for it. Texts are printable, but for those that only policies are given.

use crate::record::{About, Answer, Base, Begin, Outcome, Record, SavedState, kind};
use crate::text::printable_lines;
use std::sync::{Mutex, PoisonError};
use tally_contract::limits::{COMMANDS_MAX, FORMS_MAX, RESERVES_MAX};
use tally_contract::objective::tpot_ns;
use tally_engine::policy::{
    self, Class, ClientInfo, Command, Completion, Decision, Event, FaultKind, Form, Launch,
    Objective, ServiceView, SharingMode, Subscriptions, TokensView, UnitProfile, Usage,
};
use tally_engine::profile::{Demand, FormView, KernelKey, KernelView, Transformation};
use tally_ipc::text::printable;

/// Different reasons for `whole-only` that one process reads. Each is kept for its
/// whole life, because the engine's are constants.
const REASONS_MAX: usize = 256;
/// Most bytes of a reason.
const REASON_BYTES_MAX: usize = 512;

/// What a record's bytes are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(&'static str);

type Result<T> = std::result::Result<T, Malformed>;

fn constant(text: &str) -> Result<&'static str> {
    static REASONS: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());
    let mut all = REASONS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = all.iter().find(|known| **known == text) {
        return Ok(known);
    }
    if text.len() > REASON_BYTES_MAX || all.len() >= REASONS_MAX {
        return Err(Malformed("too many or too long reasons for whole-only"));
    }
    let kept: &'static str = Box::leak(text.to_owned().into_boxed_str());
    all.push(kept);
    Ok(kept)
}

struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(count).ok_or(Malformed("it ends too soon"))?;
        self.0 = rest;
        Ok(head)
    }
    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }
    fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }
    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }
    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }
    fn flag(&mut self) -> Result<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed("a flag is neither 0 nor 1")),
        }
    }
    fn bytes(&mut self) -> Result<&'a [u8]> {
        let count = self.u32()? as usize;
        self.take(count)
    }
    /// A text as it was written: a replay needs it so, and nobody is shown it.
    fn raw_text(&mut self) -> Result<&'a str> {
        std::str::from_utf8(self.bytes()?).map_err(|_| Malformed("a text is not UTF-8"))
    }
    fn text(&mut self) -> Result<String> {
        Ok(printable(self.raw_text()?.into()))
    }
    fn lines(&mut self) -> Result<String> {
        Ok(printable_lines(self.raw_text()?))
    }
    fn class(&mut self) -> Result<Class> {
        Ok(if self.flag()? { Class::BestEffort } else { Class::High })
    }
    fn three(&mut self) -> Result<[u32; 3]> {
        Ok([self.u32()?, self.u32()?, self.u32()?])
    }
    /// A count of things of at least `bytes_min` each.
    fn count(&mut self, bytes_min: usize) -> Result<usize> {
        let count = self.u32()? as usize;
        if count > self.0.len() / bytes_min {
            return Err(Malformed("a list is longer than its record"));
        }
        Ok(count)
    }

    fn client(&mut self) -> Result<ClientInfo> {
        let (id, class, name) = (self.u32()?, self.class()?, self.text()?);
        let count = self.count(8)?;
        let mut labels = Vec::with_capacity(count);
        for _ in 0..count {
            labels.push((self.text()?, self.text()?));
        }
        Ok(ClientInfo { id, class, name, labels })
    }

    fn about(&mut self) -> Result<About> {
        let generation = self.u64()?;
        let (name, digest, path) = (self.text()?, self.text()?, self.text()?);
        let config = self.raw_text()?.to_owned();
        let count = self.count(5)?;
        let mut reasons = Vec::with_capacity(count);
        for _ in 0..count {
            reasons.push((self.u8()?, self.text()?));
        }
        let saved = match self.flag()? {
            false => None,
            true => Some(SavedState {
                format: self.raw_text()?.to_owned(),
                version: self.u32()?,
                data: self.bytes()?.to_vec(),
            }),
        };
        Ok(About { generation, name, digest, path, config, reasons, saved })
    }

    fn form(&mut self) -> Result<Form> {
        Ok(match self.u8()? {
            0 => Form::Whole,
            1 => Form::Sliced,
            2 => Form::Preemptible,
            3 => Form::SmLimited,
            _ => return Err(Malformed("an unknown form")),
        })
    }

    fn base(&mut self) -> Result<Base> {
        let sharing = self.sharing()?;
        let count = self.count(4)?;
        if count > RESERVES_MAX {
            return Err(Malformed("more partitions of the SMs than a core has"));
        }
        let reserve_sms = (0..count).map(|_| self.u32()).collect::<Result<_>>()?;
        Ok(Base { sharing, reserve_sms })
    }

    fn sharing(&mut self) -> Result<SharingMode> {
        match self.u8()? {
            0 => Ok(SharingMode::Concurrent),
            1 => Ok(SharingMode::TimeSliced),
            _ => Err(Malformed("an unknown sharing mode")),
        }
    }

    fn view(&mut self) -> Result<KernelView> {
        let (count, mean_ns) = (self.u64()?, self.u64()?);
        let (p50_ns, p99_ns, latest_ns) = (self.u64()?, self.u64()?, self.u64()?);
        let waves_permille = self.u64()?;
        let mut demanded = || {
            u16::try_from(self.u32()?).map_err(|_| Malformed("a kernel demands more than it can"))
        };
        let demand = Demand { blocks_per_sm: demanded()?, registers: demanded()? };
        let transformation = match self.u8()? {
            0 => Transformation::Unknown,
            1 => Transformation::Preparable,
            2 => Transformation::Preparing,
            3 => match self.u8()? {
                bits @ 0..4 => {
                    Transformation::Ready { sliced: bits & 1 != 0, preemptible: bits & 2 != 0 }
                }
                _ => return Err(Malformed("unknown forms of a transformed kernel")),
            },
            4 => Transformation::WholeOnly(constant(&self.text()?)?),
            _ => return Err(Malformed("an unknown state of transformation")),
        };
        let count_forms = self.count(53)?;
        if count_forms > FORMS_MAX {
            return Err(Malformed("more forms than a kernel can have"));
        }
        let mut forms: Vec<FormView> = Vec::with_capacity(count_forms);
        for _ in 0..count_forms {
            let form = FormView {
                form: self.form()?,
                argument: self.u32()?,
                count: self.u64()?,
                mean_ns: self.u64()?,
                p50_ns: self.u64()?,
                p99_ns: self.u64()?,
                latest_ns: self.u64()?,
                turnaround_ns: self.u64()?,
            };
            if forms.last().is_some_and(|f| (f.form, f.argument) >= (form.form, form.argument)) {
                return Err(Malformed("forms are not in order"));
            }
            forms.push(form);
        }
        Ok(KernelView {
            count,
            mean_ns,
            p50_ns,
            p99_ns,
            latest_ns,
            demand,
            waves_permille,
            transformation,
            forms,
        })
    }

    fn commands(&mut self) -> Result<Vec<Command>> {
        let count = self.count(1)?;
        if count > COMMANDS_MAX {
            return Err(Malformed("more commands than a call can give"));
        }
        let mut commands = Vec::with_capacity(count);
        for _ in 0..count {
            commands.push(match self.u8()? {
                0 => Command::SetTimer { delay_ns: self.u64()?, token: self.u64()? },
                1 => Command::SetWindow { client: self.u32()?, window_ns: self.u64()? },
                2 => Command::RevokeLease(self.u32()?),
                3 => Command::SetYield { client: self.u32()?, yielded: self.flag()? },
                4 => Command::SetAutoYield {
                    client: self.u32()?,
                    enabled: self.flag()?,
                    idle_ns: self.u64()?,
                },
                5 => Command::SetUngated { client: self.u32()?, ungated: self.flag()? },
                6 => Command::SetWidth { client: self.u32()?, sms: self.u32()? },
                7 => Command::Reset,
                _ => return Err(Malformed("an unknown command")),
            });
        }
        Ok(commands)
    }

    fn launch(&mut self) -> Result<Launch> {
        Ok(Launch {
            now_ns: self.u64()?,
            client: self.u32()?,
            class: self.class()?,
            kernel: self.u32()?,
            state: self.u32()?,
            offered: self.u32()?,
            grid_blocks: self.u64()?,
            block_threads: self.u32()?,
            shared_bytes: self.u32()?,
            predicted_ns: self.u64()?,
            waited_ns: self.u64()?,
            in_flight_ns: self.u64()?,
            high_idle_ns: self.u64()?,
            high_clients: self.u32()?,
            waiting_clients: self.u32()?,
            stream: self.u32()?,
            sm_count: self.u32()?,
        })
    }

    fn answer<T>(&mut self, ok: impl FnOnce(&mut Self, u8) -> Result<T>) -> Result<Answer<T>> {
        let tag = self.u8()?;
        let outcome = match fault_kind(tag) {
            Some(kind) => {
                let (timed, message) = (self.flag()?, self.lines()?);
                Outcome::Fault { kind, timed, message }
            }
            None => Outcome::Ok(ok(self, tag)?),
        };
        Ok(Answer { outcome, commands: self.commands()? })
    }

    fn decision(&mut self, tag: u8) -> Result<policy::Answer> {
        let decision = match tag {
            0 => Decision::Run(self.u32()?),
            1 => Decision::Hold(self.u64()?),
            2 => Decision::HoldUntilCompletion(self.u64()?),
            3 => Decision::Sliced(self.u32()?),
            4 => Decision::Preemptible,
            5 => Decision::SmLimited(self.u32()?),
            _ => return Err(Malformed("an unknown decision")),
        };
        Ok(policy::Answer { decision, reason: self.u8()? })
    }

    fn usage(&mut self) -> Result<Usage> {
        Ok(Usage {
            waiting_since_ns: self.u64()?,
            in_flight: self.u32()?,
            in_flight_ns: self.u64()?,
            measured_ns: self.u64()?,
            charged_ns: self.u64()?,
            min_share_permille: self.u32()?,
            backlogged_ns: self.u64()?,
            backlogged_since_ns: self.u64()?,
            limit_cost_ns: self.u64()?,
        })
    }

    fn service(&mut self) -> Result<ServiceView> {
        let objective = match self.flag()? {
            false => None,
            true => {
                let (slo_ns, percentile) = (self.u64()?, f64::from_bits(self.u64()?));
                let valid = Objective::new(slo_ns as f64, percentile);
                Some(valid.map_err(|_| Malformed("an objective is out of range"))?)
            }
        };
        Ok(ServiceView {
            objective,
            open_since_ns: self.u64()?,
            open_is_token: self.flag()?,
            units: self.u64()?,
            units_within: self.u64()?,
            recent: self.u32()?,
            recent_within: self.u32()?,
            p50_ns: self.u64()?,
            p99_ns: self.u64()?,
            tokens: if self.flag()? { Some(self.tokens()?) } else { None },
            profile: if self.flag()? { Some(self.unit_profile()?) } else { None },
        })
    }

    fn unit_profile(&mut self) -> Result<UnitProfile> {
        Ok(UnitProfile {
            units: self.u64()?,
            launches: self.u32()?,
            gpu_busy_ns: self.u64()?,
            gaps: self.u32()?,
            gaps_ns: self.u64()?,
            gap_median_ns: self.u64()?,
            gap_longest_ns: self.u64()?,
            sms_max: self.u32()?,
            sms_mean: self.u32()?,
        })
    }

    fn tokens(&mut self) -> Result<TokensView> {
        let tpot_ns = tpot_ns(self.u64()? as f64);
        Ok(TokensView {
            tpot_ns: tpot_ns.map_err(|_| Malformed("an objective is out of range"))?,
            count: self.u64()?,
            within: self.u64()?,
            recent: self.u32()?,
            recent_within: self.u32()?,
            p50_ns: self.u64()?,
            p99_ns: self.u64()?,
        })
    }

    fn done(&mut self) -> Result<Completion> {
        Ok(Completion {
            client: self.u32()?,
            kernel: self.u32()?,
            form: self.form()?,
            argument: self.u32()?,
            predicted_ns: self.u64()?,
            measured_ns: Some(self.u64()?).filter(|ns| *ns > 0),
            charged_ns: self.u64()?,
        })
    }

    fn event(&mut self) -> Result<Event> {
        Ok(match self.u8()? {
            0 => Event::Joined(self.client()?),
            1 => Event::Left(self.u32()?),
            2 => Event::HighStarted,
            3 => Event::HighEnded,
            4 => Event::Completed(self.done()?),
            5 => Event::Timer(self.u64()?),
            6 => Event::UnitBegan {
                client: self.u32()?,
                since_ns: self.u64()?,
                deadline_ns: self.u64()?,
            },
            7 => {
                Event::UnitsEnded { client: self.u32()?, units: self.u32()?, took_ns: self.u64()? }
            }
            _ => return Err(Malformed("an unknown event")),
        })
    }
}

fn fault_kind(tag: u8) -> Option<FaultKind> {
    Some(match tag {
        0x10 => FaultKind::Trap,
        0x11 => FaultKind::Overrun,
        0x12 => FaultKind::Memory,
        0x13 => FaultKind::Nonsense,
        0x14 => FaultKind::Disabled,
        0x15 => FaultKind::Stall,
        _ => return None,
    })
}

/// The record that `bytes` are, all of them.
///
/// # Errors
/// What is wrong with them.
pub fn record(bytes: &[u8]) -> Result<Record> {
    let mut b = Bytes(bytes);
    let record = match b.u8()? {
        kind::POLICY => Record::Policy(b.about()?),
        kind::BASE => Record::Base(b.base()?),
        kind::KERNEL => {
            let id = b.u32()?;
            let image = u128::from(b.u64()?) | u128::from(b.u64()?) << 64;
            let (grid, block, name) = (b.three()?, b.three()?, b.text()?);
            Record::Kernel { id, key: KernelKey { name, image, grid, block } }
        }
        kind::PROFILE => Record::Profile { id: b.u32()?, view: b.view()? },
        kind::CLIENT => Record::Client(b.client()?),
        kind::USAGE => Record::Usage { id: b.u32()?, usage: b.usage()? },
        kind::SERVICE => Record::Service { id: b.u32()?, view: b.service()? },
        kind::GONE => Record::Gone(b.u32()?),
        kind::BEGIN => {
            let how = match b.u8()? {
                0 => Begin::PolicyStart,
                1 => Begin::MidRun,
                2 => Begin::AfterGap,
                3 => Begin::Saved,
                _ => return Err(Malformed("an unknown kind of beginning")),
            };
            let (lost, bits) = (b.u64()?, b.u8()?);
            let subscribed = Subscriptions::of_bits(bits);
            if subscribed.bits() != bits {
                return Err(Malformed("an unknown subscription"));
            }
            Record::Begin { how, lost, subscribed, sm_count: b.u32()? }
        }
        kind::START => Record::Start(b.commands()?),
        kind::DECIDE => Record::Decide { launch: b.launch()?, answer: b.answer(Bytes::decision)? },
        kind::EVENT => Record::Event {
            now_ns: b.u64()?,
            event: b.event()?,
            answer: b.answer(|_, tag| match tag {
                0 => Ok(()),
                _ => Err(Malformed("an unknown outcome")),
            })?,
        },
        kind::COMPLETION => Record::Completion { now_ns: b.u64()?, done: b.done()? },
        kind::FAULT => {
            let now_ns = b.u64()?;
            let kind = fault_kind(b.u8()?).ok_or(Malformed("an unknown fault"))?;
            let _timed = b.flag()?;
            Record::Fault { now_ns, kind, message: b.lines()? }
        }
        kind::END => Record::End { reason: b.text()?, dropped: b.u64()? },
        _ => return Err(Malformed("an unknown kind of record")),
    };
    if b.0.is_empty() { Ok(record) } else { Err(Malformed("it is longer than its content")) }
}
