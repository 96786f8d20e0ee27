//! PTX: a front end that owns what it changes and copies the rest.
//!
//! [`plan`] reads a module and decides, kernel by kernel, which edits give it the transformed
//! form; every other byte of the text stays as it was. `tally-ptx` takes the text apart,
//! `module`, `body` and `reach` find what forbids transforming, `prelude` holds
//! the code that is put in. What is not understood is refused.

mod body;
mod edits;
mod literals;
mod module;
mod params;
mod prelude;
mod reach;

pub use edits::{Edit, undo};
pub use params::{PARAM_BYTES_MAX, PARAM_BYTES_MAX_OLD};

use crate::control::CONTROL_BYTES;
use crate::{KernelForm, Rewritten, TransformRefusal, TransformedKernel};
use body::fact;
use module::{Entry, Module};
use reach::Reach;
use std::collections::HashSet;
use tally_ptx::{Function, PtxError};

/// What the name of the control block's parameter ends in.
const PARAM_SUFFIX: &str = "_param_tally";

/// The first version of PTX that has all that the prelude uses.
const VERSION_MIN: (u32, u32) = (6, 0);
/// Older text has forms that later versions do not keep.
const VERSION_RAISED_FROM: (u32, u32) = (3, 0);
/// The first architecture that has what the prelude uses.
const TARGET_MIN: u32 = 30;

/// Give kernels of a PTX module a transformed form; see [`crate::image::rewrite`].
///
/// A kernel that uses variables of the module is refused
/// ([`TransformRefusal::WritableGlobals`]): the result is loaded beside the original and has
/// its own. Strings that are only printed do not count. Text that was rewritten
/// before is refused with [`TransformRefusal::Metadata`].
///
/// # Errors
/// What makes the whole module unfit.
pub fn rewrite(
    source: &str,
    form: KernelForm,
    only: Option<&[&str]>,
) -> Result<Rewritten, TransformRefusal> {
    plan(source, form, only).map(|plan| plan.apply(source))
}

/// What is to be done to a module's text.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Edits in rising order; none overlaps another.
    pub edits: Vec<Edit>,
    /// Kernels that get the transformed form.
    pub kernels: Vec<TransformedKernel>,
    /// Kernels that do not get it, and why.
    pub refused: Vec<(String, TransformRefusal)>,
}

impl Plan {
    /// Do it to the text that it was made from.
    pub fn apply(self, source: &str) -> Rewritten {
        Rewritten {
            image: edits::apply(source, &self.edits).into_bytes(),
            is_ptx: true,
            kernels: self.kernels,
            refused: self.refused,
        }
    }
}

/// Decide what is to be done.
///
/// # Errors
/// What makes the whole module unfit.
pub fn plan(
    source: &str,
    form: KernelForm,
    only: Option<&[&str]>,
) -> Result<Plan, TransformRefusal> {
    let tokens = tally_ptx::lex(source)?;
    let module = module::read(source, &tokens)?;
    let raise = module.version < VERSION_MIN;
    if module.version < VERSION_RAISED_FROM || module.target < TARGET_MIN {
        return Err(TransformRefusal::PtxVersion);
    }
    let reach = reach::reach(&module)?;
    let stem = prelude::stem(source);
    let planner = Planner { module: &module, reach: &reach, form, stem: &stem };
    let only: Option<HashSet<&str>> = only.map(|names| names.iter().copied().collect());
    let mut plan = Plan { edits: Vec::new(), kernels: Vec::new(), refused: Vec::new() };
    let mut transformed = HashSet::new();
    for (at, entry) in module.entries.iter().enumerate() {
        if only.as_ref().is_some_and(|only| !only.contains(entry.name)) {
            continue;
        }
        match planner.refusal(at) {
            Some(why) => plan.refused.push((entry.name.to_string(), why)),
            None => {
                plan.edits.extend(planner.edits(at));
                plan.kernels.push(planner.kernel(at, entry));
                transformed.insert(entry.name);
            }
        }
    }
    for declared in &module.declared {
        let name = declared.name.text(source);
        if transformed.contains(name) {
            plan.edits.push(planner.add_parameter(declared, &planner.parameter_name(name)));
        }
    }
    if raise && !plan.kernels.is_empty() {
        let token = module.version_token;
        let text = format!("{}.{}", VERSION_MIN.0, VERSION_MIN.1);
        plan.edits.push(Edit::replace(token.start as usize..token.end() as usize, text));
    }
    plan.edits.sort_by_key(|e| e.at);
    Ok(plan)
}

impl From<PtxError> for TransformRefusal {
    fn from(_: PtxError) -> Self {
        TransformRefusal::Malformed
    }
}

/// Why a kernel that has to do with all this cannot be transformed.
fn by_content(all: u16) -> Option<TransformRefusal> {
    let rules = [
        (fact::UNRESOLVED, TransformRefusal::Relocatable),
        (fact::GRID_SYNC, TransformRefusal::GridSync),
        (fact::DEPENDS, TransformRefusal::ProgrammaticDependence),
        (fact::STEALS, TransformRefusal::LaunchForm),
        (fact::GRID_ID, TransformRefusal::LaunchForm),
        (fact::GLOBALS, TransformRefusal::WritableGlobals),
        (fact::TAKES_ADDRESS, TransformRefusal::AddressTaken),
    ];
    rules.into_iter().find(|(bit, _)| all & bit != 0).map(|(_, why)| why)
}

struct Planner<'m, 'a> {
    module: &'m Module<'a>,
    reach: &'m Reach,
    form: KernelForm,
    stem: &'m str,
}

impl Planner<'_, '_> {
    /// Why an entry cannot be transformed.
    fn refusal(&self, at: usize) -> Option<TransformRefusal> {
        let entry = &self.module.entries[at];
        let layout = match &entry.layout {
            Ok(layout) => layout,
            Err(why) => return Some(*why),
        };
        if self.already_transformed(entry) {
            return Some(TransformRefusal::Metadata);
        }
        let long = self.module.version >= (8, 1) && self.module.target >= 70;
        let room = if long { PARAM_BYTES_MAX } else { PARAM_BYTES_MAX_OLD };
        if layout.next_aligned() + CONTROL_BYTES > room {
            return Some(TransformRefusal::ParameterSpace);
        }
        if entry.head.cluster.is_some_and(|dims| !dims.iter().all(|d| d.is_power_of_two()))
            || entry.head.counts_clusters
        {
            return Some(TransformRefusal::ClusterShape);
        }
        if self.reach.taken[at] {
            return Some(TransformRefusal::AddressTaken);
        }
        let own = self.reach.entries[at].bits;
        by_content(own | self.reach.below[at])
            .or_else(|| self.by_form(entry, own, self.reach.below[at], at))
    }

    fn by_form(
        &self,
        entry: &Entry<'_>,
        own: u16,
        below: u16,
        at: usize,
    ) -> Option<TransformRefusal> {
        if self.form == KernelForm::ByClaims {
            return None;
        }
        let clusters =
            entry.head.may_cluster || entry.head.cluster.is_some_and(|dims| dims != [1; 3]);
        if clusters || (own | below) & fact::CLUSTER != 0 {
            return Some(TransformRefusal::ClusterShape);
        }
        if below & fact::INDEX != 0 {
            return Some(TransformRefusal::IndexInFunction);
        }
        let odd = self.reach.entries[at].reads.iter().any(|r| !r.replaceable);
        // Reads of 16 bits, as PTX 1 had them.
        odd.then_some(TransformRefusal::PtxVersion)
    }

    fn already_transformed(&self, entry: &Entry<'_>) -> bool {
        let list = entry.head.parameters.unwrap_or_default();
        let last = list.iter().rev().find(|t| t.is_word());
        last.is_some_and(|t| t.text(self.module.source).ends_with(PARAM_SUFFIX))
    }

    fn kernel(&self, at: usize, entry: &Entry<'_>) -> TransformedKernel {
        let layout = entry.layout.unwrap_or_default();
        let all = self.reach.entries[at].bits | self.reach.below[at];
        TransformedKernel {
            name: entry.name.to_string(),
            parameter_count: layout.count,
            control_offset: layout.next_aligned(),
            cluster: entry.head.cluster,
            may_wait: all & (fact::SEES_OTHERS | fact::INDIRECT) != 0,
            reads_sm: all & (fact::SM | fact::INDIRECT) != 0,
        }
    }

    fn parameter_name(&self, entry: &str) -> String {
        format!("{entry}{PARAM_SUFFIX}")
    }

    fn add_parameter(&self, to: &Function<'_>, param: &str) -> Edit {
        let declaration = format!("\n\t.param .align 8 .b8 {param}[{CONTROL_BYTES}]");
        match to.parameters {
            // After the last parameter, or after the parenthesis of an empty list.
            Some([.., last, _]) => {
                let comma = if last.is(b'(') { "" } else { "," };
                Edit::insert(last.end() as usize, format!("{comma}{declaration}"))
            }
            _ => Edit::insert(to.name.end() as usize, format!("({declaration}\n)")),
        }
    }

    fn edits(&self, at: usize) -> Vec<Edit> {
        let entry = &self.module.entries[at];
        let param = self.parameter_name(entry.name);
        let mut edits = vec![self.add_parameter(&entry.head, &param)];
        let open = entry.body[0].end() as usize;
        let text = match self.form {
            KernelForm::ByClaims => prelude::prelude(self.stem, &param, self.module.target),
            KernelForm::ByOffset => prelude::by_offset(self.stem, &param),
        };
        edits.push(Edit::insert(open, text));
        if self.form == KernelForm::ByOffset {
            edits.extend(self.reach.entries[at].reads.iter().map(|read| {
                let text = prelude::index(self.stem, read.size, read.axis);
                Edit::replace(read.start as usize..read.end as usize, text)
            }));
        }
        edits
    }
}
