//! Chooses degrees, cuts the model and checks that it fits.

use crate::{ModelShape, PlanError, PlanOptions, Policy, ShardPlan, Topology};

/// Cuts `shape` over `topology` as `policy` says.
///
/// # Errors
/// [`PlanError`] with the numbers that disagree, if no such plan exists or it does not fit.
pub fn plan(
    _shape: &ModelShape,
    _topology: &Topology,
    _policy: &Policy,
    _options: &PlanOptions,
) -> Result<ShardPlan, PlanError> {
    todo!()
}
