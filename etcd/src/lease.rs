//! A lease: what is written under it goes when nobody renews it.
//! Invariant: by the clock of its holder a lease has ended no later than by etcd's: time counts from before a renewal
//! was sent.

use std::time::Duration;

use etcd_client::{Error, LeaseKeepAliveStream, LeaseKeeper};
use tokio::time::Instant;

use crate::{Connection, EtcdError};

/// A lease on a connection.
pub struct Lease {
    keeper: LeaseKeeper,
    answers: LeaseKeepAliveStream,
    valid_until: Instant,
}

impl Lease {
    /// Goes on with the lease `held`, if that lives, or takes a new one of `ttl`.
    ///
    /// # Errors
    /// [`EtcdError`] if etcd does not answer.
    pub async fn hold(connection: &Connection, held: Option<i64>, ttl: Duration) -> Result<Self, EtcdError> {
        let mut leases = connection.client.lease_client();
        if let Some(id) = held {
            let begin = Instant::now();
            match connection.within(async { Ok(leases.keep_alive(id).await) }).await? {
                Ok((keeper, answers)) => return Ok(Self { keeper, answers, valid_until: begin + ttl }),
                Err(Error::LeaseKeepAliveError(reason)) => {
                    tracing::info!(reason, "the lease has ended, taking another")
                }
                Err(error) => return Err(connection.failed(error)),
            }
        }
        let seconds = ttl.as_secs().max(1).try_into().unwrap_or(i64::MAX);
        let begin = Instant::now();
        let id = connection.within(leases.grant(seconds, None)).await?.id();
        let (keeper, answers) = connection.within(leases.keep_alive(id)).await?;
        Ok(Self { keeper, answers, valid_until: begin + ttl })
    }

    /// Its id.
    pub fn id(&self) -> i64 {
        self.keeper.id()
    }

    /// Until when it lives for certain.
    pub fn valid_until(&self) -> Instant {
        self.valid_until
    }

    /// Lets it live for another `ttl`.
    ///
    /// # Errors
    /// [`EtcdError::LeaseLost`] if it has ended; another if etcd does not answer.
    pub async fn renew(&mut self, connection: &Connection, ttl: Duration) -> Result<(), EtcdError> {
        let begin = Instant::now();
        connection.within(self.keeper.keep_alive()).await?;
        match connection.within(self.answers.message()).await? {
            Some(answer) if answer.ttl() > 0 => self.valid_until = begin + ttl,
            Some(_) => return Err(EtcdError::LeaseLost),
            None => return Err(connection.ended("the stream of renewals ended")),
        }
        Ok(())
    }

    /// Gives it back, so that what was written under it goes at once.
    ///
    /// # Errors
    /// [`EtcdError`] if etcd does not answer; then it ends by itself.
    pub async fn revoke(self, connection: &Connection) -> Result<(), EtcdError> {
        let id = self.id();
        connection.within(connection.client.lease_client().revoke(id)).await.map(drop)
    }
}
