"""The artifact store over dagster-aws's S3Resource (extra `aws`).

Not imported by `tensorize_assets.definitions`: importing dagster_aws takes more than a second.
"""

from dagster_aws.s3 import S3Resource
from pydantic import Field, ValidationError

from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.jsonio import describe
from tensorize_assets.core.s3 import S3Access, S3Credentials, S3Settings, resolve
from tensorize_assets.resources.store import StoreResource


class S3StoreResource(StoreResource):
    """A StoreResource that reaches S3 as a project's S3Resource does.

    What is set there goes before the catalog's `s3` and before the environment.
    """

    s3: S3Resource = Field(description="The project's dagster-aws S3Resource.")

    def access(self) -> S3Access:
        """As the base, from the S3Resource. Raises StoreError for what has no equal here."""
        ours = self.s3
        if ours.use_unsigned_session:
            raise StoreError(
                "the S3Resource has use_unsigned_session, and artifacts are written: give it "
                "credentials"
            )
        if ours.verify is False:
            raise StoreError(
                "the S3Resource has verify: false, and unverified connections are not used; set "
                "the certificate with `ca_bundle` under `s3` in the catalog, or AWS_CA_BUNDLE"
            )
        if not ours.use_ssl:
            raise StoreError(
                "the S3Resource has use_ssl: false; give it an endpoint_url that starts with "
                "http:// instead, if that is what you want"
            )
        settings = self.catalog.catalog().s3 or S3Settings()
        given = {
            "endpoint_url": ours.endpoint_url,
            "region": ours.region_name,
            "profile": ours.profile_name,
        }
        changes: dict[str, str | int] = {
            name: value for name, value in given.items() if value is not None
        }
        if "max_attempts" in ours.model_fields_set:
            changes["max_attempts"] = ours.max_attempts
        credentials = None
        if ours.aws_access_key_id and ours.aws_secret_access_key:
            credentials = S3Credentials(
                access_key_id=ours.aws_access_key_id,
                secret_access_key=ours.aws_secret_access_key,
                session_token=ours.aws_session_token,
            )
        elif ours.aws_access_key_id or ours.aws_secret_access_key:
            raise StoreError(
                "the S3Resource has only one of aws_access_key_id and aws_secret_access_key; set "
                "both, or none"
            )
        try:
            settings = S3Settings.model_validate({**settings.model_dump(), **changes})
        except ValidationError as error:
            # Not the values: an endpoint may hold a key.
            raise StoreError(f"the S3Resource's settings: {describe(error)}") from None
        return resolve(settings, credentials)
